"""Serving over several numbers of ranks: what is measured on a machine, and what it comes to beside one GPU."""
