"""Models whose weights are packed."""
