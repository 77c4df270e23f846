"""All that is noted of an engine's requests and steps while it serves."""

from __future__ import annotations

import math

from strata.engine.loop import StepTiming
from strata.engine.watch.request_times import RequestTimes
from strata.engine.watch.step_shares import StepShares
from strata.engine.watch.step_window import Standings, StepWindow

# How often it is looked how an engine stands, in seconds.
LOOK_EVERY = 0.5


class Watch:
    """requests: their ledgers. ranks: with sequences of their own. records: steps are meant to replay recordings."""

    def __init__(self, shares: StepShares, *, ranks: int = 1, records: bool = False) -> None:
        self._shares = shares
        self.requests = RequestTimes(has_floor=shares.floors is not None, ranks=ranks)
        self._window = StepWindow(records=records)
        self._standings, self._looked = Standings(), -math.inf

    def step(self, timing: StepTiming) -> None:
        """A step has ended; its sequences have not yet."""
        look = self._shares.look(timing.plan)
        self._window.step(timing, look, self.requests.step(timing, look))

    def standings(self, now: float, compiled: int) -> Standings:
        """How the engine stood lately. compiled: kernels since it was ready."""
        if now - self._looked >= LOOK_EVERY:
            self._standings, self._looked = self._window.standings(now, compiled), now
        return self._standings
