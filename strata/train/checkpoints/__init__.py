"""Checkpoints of a run: every rank writes what it holds while training goes on, and any layout reads it back."""
