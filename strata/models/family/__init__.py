"""One file per family: what its layers compute, under the names of its checkpoints."""
