"""Kernels by which GPUs add up their numbers without a library."""
