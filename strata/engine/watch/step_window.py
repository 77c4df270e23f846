"""The steps of the last seconds in sums: how near they were to their floor, and what they waited for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from strata.engine.loop import StepTiming
from strata.engine.scheduling.held import Holdup
from strata.engine.watch.request_times import RequestTimes, StepSeconds
from strata.engine.watch.step_shares import StepLook, StepShares
from strata.engine.watch.verdict import Shares, Standing, standing

WINDOW_SECONDS = 10


@dataclass(slots=True)
class _Sums:
    """Of the steps that ended in one second. seconds: from the end of the step before, without rests. known: of the
    steps whose floor is; timed: of those whose prediction is."""

    second: int
    seconds: float = 0.0
    gap: float = 0.0
    masks: float = 0.0
    recomputed: float = 0.0
    launches: float = 0.0
    floor: float = 0.0
    known: float = 0.0
    predicted: float = 0.0
    timed: float = 0.0
    held: dict[Holdup, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)


class Standings(NamedTuple):
    """How an engine stands. floor: share of the time of steps that their floors are, gaps between them included; None
    where there were no steps or floors are not known. predicted: seconds of steps as predicted, by those measured; None
    as well. gap: share of the time in which the device waited for the host. verdict: None where there were no steps."""

    floor: float | None = None
    predicted: float | None = None
    gap: float | None = None
    verdict: Standing | None = None


class StepWindow:
    """records: steps are meant to replay recordings, so that those that do not are a loss."""

    def __init__(self, *, records: bool, seconds: int = WINDOW_SECONDS) -> None:
        self._records, self._window = records, seconds
        self._sums: deque[_Sums] = deque()
        self._compiled: deque[tuple[float, int]] = deque()

    def step(self, timing: StepTiming, look: StepLook, took: StepSeconds) -> None:
        """A step has ended."""
        gap, work, recomputed = took
        second = int(timing.ended)
        if not self._sums or self._sums[-1].second != second:
            self._sums.append(_Sums(second))
            self._forget(second)
        sums = self._sums[-1]
        sums.seconds += gap + work
        sums.gap += gap
        sums.masks += min(work, timing.drawing)
        sums.recomputed += recomputed
        if look.floor is not None:
            floor = look.floor.seconds
            sums.floor += floor
            sums.known += gap + work
            sums.bounds[look.floor.bound] = sums.bounds.get(look.floor.bound, 0.0) + floor
            if self._records and timing.late and not timing.recorded:
                sums.launches += max(0.0, work - floor)
        if look.predicted is not None:
            sums.predicted += look.predicted
            sums.timed += work
        for held in timing.held:
            if held.holdup is not None:
                sums.held[held.holdup] = sums.held.get(held.holdup, 0.0) + (gap + work) / len(timing.held)

    def standings(self, now: float, compiled: int) -> Standings:
        """compiled: kernels since the engine was ready."""
        self._forget(int(now))
        self._compiled.append((now, compiled))
        while self._compiled[0][0] < now - self._window:
            self._compiled.popleft()
        total = self._total("seconds")
        if not total:
            return Standings()
        known, timed = self._total("known"), self._total("timed")
        floor = self._total("floor") / known if known else None
        held: dict[Holdup, float] = {}
        bounds: dict[str, float] = {}
        for sums in self._sums:
            for cause, seconds in sums.held.items():
                held[cause] = held.get(cause, 0.0) + seconds / total
            for bound, seconds in sums.bounds.items():
                bounds[bound] = bounds.get(bound, 0.0) + seconds
        shares = Shares(
            gap=self._total("gap") / total,
            masks=self._total("masks") / total,
            recomputed=self._total("recomputed") / total,
            launches=self._total("launches") / total,
            held=held,
            floor=floor,
            bound=_bound(bounds),
            compiled=compiled - self._compiled[0][1],
        )
        predicted = self._total("predicted") / timed if timed else None
        return Standings(floor, predicted, shares.gap, standing(shares))

    def _forget(self, second: int) -> None:
        while self._sums and self._sums[0].second <= second - self._window:
            self._sums.popleft()

    def _total(self, name: str) -> float:
        return float(sum(getattr(sums, name) for sums in self._sums))


def _bound(bounds: dict[str, float]) -> Literal["compute", "memory", "communication"]:
    largest = max(bounds, key=lambda bound: bounds[bound], default="memory")
    return "compute" if largest == "compute" else "communication" if largest == "communication" else "memory"


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
