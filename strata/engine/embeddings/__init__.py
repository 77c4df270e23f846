"""Vectors of prompts."""
