"""Weights become zeros: which, and what the others make up for."""
