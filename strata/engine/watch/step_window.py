"""The steps of the last seconds in sums: how near they were to their floor, and what they waited for. Beside the
ledgers of requests, it is all that is noted of an engine while it serves."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, NamedTuple

from strata.engine.loop import StepTiming
from strata.engine.scheduling.config import HOLDUPS
from strata.engine.watch.request_times import RequestTimes
from strata.engine.watch.step_shares import StepLook, StepShares
from strata.engine.watch.verdict import Bound, Shares, Standing, standing

WINDOW_SECONDS = 10


class Standings(NamedTuple):
    """How an engine stands. floor: share of the time of steps that their floors are, gaps between them included; None
    where there were no steps or floors are not known. predicted: seconds of steps as predicted, by those measured; None
    as well. gap: share of the time in which the device waited for the host. verdict: None where there were no steps."""

    floor: float | None = None
    predicted: float | None = None
    gap: float | None = None
    verdict: Standing | None = None


class StepWindow:
    """captures: steps are meant to replay CUDA graphs, so that those that do not are a loss."""

    def __init__(self, *, captures: bool, seconds: int = WINDOW_SECONDS) -> None:
        self._captures, self._window = captures, seconds
        # Of the steps that ended in one second, sums: "seconds" from the end of the step before, without rests; "known"
        # of the steps whose floor is, "timed" of those whose prediction is; also by what held requests back, and by
        # what bounds floors.
        self._sums: deque[tuple[int, defaultdict[Any, float]]] = deque()
        self._compiled: deque[tuple[float, int]] = deque()

    def step(self, timing: StepTiming, look: StepLook, gap: float, work: float, recomputed: float) -> None:
        """A step has ended; seconds as `RequestTimes.step` tells them."""
        second = int(timing.ended)
        if not self._sums or self._sums[-1][0] != second:
            self._sums.append((second, defaultdict(float)))
            self._forget(second)
        sums = self._sums[-1][1]
        sums["seconds"] += gap + work
        sums["gap"] += gap
        sums["masks"] += min(work, timing.drawing)
        sums["recomputed"] += recomputed
        if look.floor is not None:
            floor = look.floor.seconds
            sums["floor"] += floor
            sums["known"] += gap + work
            sums["bound", look.floor.bound] += floor
            if self._captures and timing.late and not timing.captured:
                sums["launches"] += max(0.0, work - floor)
        if look.predicted is not None:
            sums["predicted"] += look.predicted
            sums["timed"] += work
        for held in timing.waiting:
            if held.holdup is not None:
                sums["held", held.holdup] += (gap + work) / len(timing.waiting)

    def standings(self, now: float, compiled: int) -> Standings:
        """compiled: kernels since the engine was ready."""
        self._forget(int(now))
        self._compiled.append((now, compiled))
        while self._compiled[0][0] < now - self._window:
            self._compiled.popleft()
        sums: defaultdict[Any, float] = defaultdict(float)
        for _, of_second in self._sums:
            for part, seconds in of_second.items():
                sums[part] += seconds
        total = sums["seconds"]
        if not total:
            return Standings()
        floor = sums["floor"] / sums["known"] if sums["known"] else None
        bounds: tuple[Bound, ...] = ("memory", "compute", "communication")
        shares = Shares(
            gap=sums["gap"] / total,
            masks=sums["masks"] / total,
            recomputed=sums["recomputed"] / total,
            launches=sums["launches"] / total,
            held={cause: sums["held", cause] / total for cause in HOLDUPS},
            floor=floor,
            bound=max(bounds, key=lambda bound: sums["bound", bound]),
            compiled=compiled - self._compiled[0][1],
        )
        predicted = sums["predicted"] / sums["timed"] if sums["timed"] else None
        return Standings(floor, predicted, shares.gap, standing(shares))

    def _forget(self, second: int) -> None:
        while self._sums and self._sums[0][0] <= second - self._window:
            self._sums.popleft()


# How often it is looked how an engine stands, in seconds.
LOOK_EVERY = 0.5


class Watch:
    """requests: their ledgers. ranks: with sequences of their own. captures: steps are meant to replay CUDA graphs."""

    def __init__(self, shares: StepShares, *, ranks: int = 1, captures: bool = False) -> None:
        self._shares = shares
        self.requests = RequestTimes(has_floor=shares.floors is not None, ranks=ranks)
        self._window = StepWindow(captures=captures)
        self._standings, self._looked = Standings(), -math.inf

    def step(self, timing: StepTiming) -> None:
        """A step has ended; its sequences have not yet."""
        look = self._shares.look(timing.plan)
        self._window.step(timing, look, *self.requests.step(timing, look))

    def standings(self, now: float, compiled: int) -> Standings:
        """How the engine stood lately. compiled: kernels since it was ready."""
        if now - self._looked >= LOOK_EVERY:
            self._standings, self._looked = self._window.standings(now, compiled), now
        return self._standings
