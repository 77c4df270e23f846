"""Matrices in fewer bits, with their scales."""
