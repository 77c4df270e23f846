"""Products by packed weights on CUDA."""
