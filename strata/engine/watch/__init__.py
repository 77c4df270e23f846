"""Watches an engine at work: where the time of each request goes, and what holds the steps back."""
