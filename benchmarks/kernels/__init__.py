"""The calls of operations that are timed, and the search for the fastest tiles."""
