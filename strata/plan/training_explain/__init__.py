"""Explains a training run from its folder: the waterfall of its steps, what holds it back, and what would help."""
