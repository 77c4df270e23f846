"""Optimizers over the shards of parameters that ranks keep: AdamW and Muon, on the device or with state in the host."""
