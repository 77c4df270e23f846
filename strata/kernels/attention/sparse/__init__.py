"""Attention that leaves out keys: blocks of a prompt's keys that pooled scores say it hardly sees."""
