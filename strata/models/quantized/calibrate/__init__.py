"""Weights are rounded to fewer bits, with a look at what they are multiplied by."""
