"""Optimizers' updates."""
