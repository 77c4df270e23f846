"""Attention: over packed sequences and over pages, of prompts and of decode steps, in training."""
