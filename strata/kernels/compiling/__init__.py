"""Kernels before they are launched: which variants a run will ask for, compiled by many processes, kept on the disk."""
