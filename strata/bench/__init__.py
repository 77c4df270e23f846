"""Measures: workloads, load, kernels and steps, each figure beside its floor. Imports no command."""
