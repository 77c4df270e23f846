"""Explains a run that was measured: where its time went, what holds it back, and what to do about it."""
