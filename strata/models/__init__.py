"""The mathematics of the model families, and what a checkpoint folder holds. Imports only `kernels`."""
