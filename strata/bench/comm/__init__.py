"""Collectives between ranks: how long each takes, beside the model of their link."""
