"""The exercises that the built-in model learns, generated from a seed, one file per family of tasks."""
