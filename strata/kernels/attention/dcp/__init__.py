"""Attention to a part of the keys of each sequence, where ranks divide them by tokens."""
