"""Checkpoints whose weights are packed, in the formats of the hubs: one file for each."""
