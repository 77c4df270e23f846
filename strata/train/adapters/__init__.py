"""Adapters beside frozen weights."""
