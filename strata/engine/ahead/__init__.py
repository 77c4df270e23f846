"""Kernels are compiled before a start needs them: which ones is found out without a GPU, in a process of its own."""
