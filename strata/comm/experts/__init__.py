"""Rows of tokens on their way to the ranks of their experts and back."""
