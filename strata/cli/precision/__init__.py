"""Commands that make models of fewer bits."""
