"""Layers whose state does not grow with the sequence: short convolutions, state spaces, delta rules."""
