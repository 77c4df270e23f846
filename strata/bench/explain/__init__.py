"""Measures runs to be explained: steps, requests, what the engine counted, and seconds of each operation."""
