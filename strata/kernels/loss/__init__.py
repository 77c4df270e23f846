"""The loss of a language model."""
