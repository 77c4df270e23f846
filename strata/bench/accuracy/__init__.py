"""How far a model's answers are from another's: divergence over text, perplexity, and tasks, with intervals."""
