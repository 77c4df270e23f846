"""Optimizers over the parts of parameters that ranks keep: AdamW and Muon, on the device or with state in the host."""
