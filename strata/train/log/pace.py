"""Where a run is and how long the rest of it takes, in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# The time that is left follows from so many lines of the log: the first steps of a run are slow.
_LINES = 8


class Place:
    """Where a run is, and how long the rest of it takes at the pace of its last lines."""

    def __init__(self, done: int, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._seen = deque([(clock(), done)], maxlen=_LINES)

    def at(self, step: int) -> str:
        """As "step 5 of 40, 12 s left"."""
        now, (began, first) = self._clock(), self._seen[0]
        self._seen.append((now, step))
        described = f"step {step} of {self._steps}"
        if step <= first or step >= self._steps:
            return described  # steps were taken back, or none is left
        return f"{described}, {duration((self._steps - step) * (now - began) / (step - first))} left"


def duration(seconds: float) -> str:
    """In words, as exactly as a guess is."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
