"""Dense layers and what they take up: products for few rows and many, in 8 bits, with norms and gating; embedding."""
