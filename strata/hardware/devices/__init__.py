"""What each maker's devices promise, and what was measured on them; a figure that no source says is left out."""
