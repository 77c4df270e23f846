"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts since the start. Prefix queries and hits are prompt tokens looked up and found at first admissions."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
