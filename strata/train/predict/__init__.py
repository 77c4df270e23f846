"""What a training step takes, told before it runs: FLOPs, memory, the least time."""
