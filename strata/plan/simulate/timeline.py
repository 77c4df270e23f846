"""How many requests wait and run and how full the KV pools are while a simulation goes on."""

from __future__ import annotations

from dataclasses import dataclass

# More samples than that are thinned to half as many, twice as far apart.
_MOST = 400


@dataclass(frozen=True)
class Moment:
    """At `seconds` from the start: requests under way that wait and that run, and the share of all KV pages in use."""

    seconds: float
    waiting: int
    running: int
    kv_usage: float


class SimulatedTimeline:
    """Sums over all engines, kept at moments that are evenly apart; `moments` has them in order."""

    def __init__(self, engines: int, pages: int) -> None:
        """pages: of all engines together."""
        self.moments: list[Moment] = []
        self._of_engine = [(0, 0, 0)] * engines
        self._waiting = self._running = self._used = 0
        self._pages = pages
        self._every = 1e-3
        self._next = 0.0

    def note(self, engine: int, waiting: int, running: int, used: int) -> None:
        """How an engine stands from now on."""
        before = self._of_engine[engine]
        self._of_engine[engine] = (waiting, running, used)
        self._waiting += waiting - before[0]
        self._running += running - before[1]
        self._used += used - before[2]

    def pass_to(self, now: float) -> None:
        """Nothing changes before `now`."""
        while self._next <= now:
            if now - self._next > _MOST * self._every:
                self._thin()
                continue
            self.moments.append(Moment(self._next, self._waiting, self._running, self._used / self._pages))
            self._next += self._every
            if len(self.moments) >= _MOST:
                self._thin()

    def _thin(self) -> None:
        self.moments = self.moments[::2]
        self._every *= 2
        if self.moments:
            self._next = self.moments[-1].seconds + self._every
