"""Ranks, named axes over them, and the collectives along an axis."""
