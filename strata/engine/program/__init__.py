"""What runs the steps of an engine: the variants of its graphs, and which of them a step takes."""
