"""Rounds of faults: a server under load loses a rank, and what becomes of its requests, processes and memory."""
