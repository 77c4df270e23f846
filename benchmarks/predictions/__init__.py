"""Holds predicted steps against measured ones."""
