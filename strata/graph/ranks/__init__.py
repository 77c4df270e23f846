"""Passes that make a graph one rank's of several."""
