"""Training steps, timed."""
