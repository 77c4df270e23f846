"""A start: how long its phases take, and the collector that is off meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Log = Callable[[str], None]


class StartupClock:
    """How long each phase of start-up took, in seconds."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        return f"ready in {sum(self.phases.values()):.2f} s: {parts}"


@contextmanager
def collector_off() -> Iterator[None]:
    """A start makes many objects and drops few: looking for cycles among them takes a third of a graph's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
