"""The commands; each composes configurations and nothing else."""
