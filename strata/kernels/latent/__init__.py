"""Latent attention: one row a token for all heads."""
