"""What a training step takes, predicted before it runs: FLOPs, memory, the least time."""
