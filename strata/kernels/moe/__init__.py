"""Mixtures of experts: routing, the experts' products, and what becomes of their results."""
