"""What an explanation says: values that tables, pages and traces are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from strata.engine.watch.verdict import Cause, Layer, Verdict

StepWork = Literal["decode", "prompt", "mixed"]
# What is explained: the wall time of a run, the mean latency of its requests, or the waits between two tokens at p99.
Subject = Literal["run", "request", "tail"]


@dataclass(frozen=True)
class LostTime:
    """Seconds of a run beyond its floor, in which layer they are lost and to what. name: for people."""

    name: str
    layer: Layer
    cause: Cause
    seconds: float


@dataclass(frozen=True)
class Waterfall:
    """From the measured seconds of a run down to its floor: the parts and the floor add up to what was measured.

    floor: 0 where it is not known.
    """

    measured: float
    floor: float
    parts: tuple[LostTime, ...]

    @property
    def unexplained(self) -> float:
        """Seconds that no part tells of; negative where parts tell of too many."""
        return self.measured - self.floor - math.fsum(part.seconds for part in self.parts)

    def seconds(self, *, layer: Layer | None = None, cause: Cause | None = None) -> float:
        """Of the parts of a layer, or cause, or both."""
        return math.fsum(
            part.seconds for part in self.parts if layer in (None, part.layer) and cause in (None, part.cause)
        )


@dataclass(frozen=True)
class Peaks:
    """What a device reaches: FLOP/s in the run's dtype, bytes per second of its memory, read and written together."""

    compute: float
    bandwidth: float


@dataclass(frozen=True)
class OperationTime:
    """All calls of one operation in a run. floor: the least seconds of each call, added up. flops, bytes: of all.

    bound: what sets most of the floor: "compute", "memory" or "communication".
    """

    name: str
    seconds: float
    floor: float
    flops: int
    bytes: int
    bound: str


# A part so small, as a share of what was measured, is the rounding of a difference.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Explained:
    """A waterfall, the operations that it is made of, and what sets most of its floor."""

    waterfall: Waterfall
    operations: tuple[OperationTime, ...]
    bound: Cause

    @staticmethod
    def of(
        measured: float, floor: float, parts: Iterable[LostTime], operations: Iterable[OperationTime], bound: Cause
    ) -> Explained:
        """Parts of one name become one. Parts and operations: the longest first."""
        found: dict[str, LostTime] = {}
        for part in parts:
            before = found.get(part.name)
            found[part.name] = part if before is None else replace(part, seconds=part.seconds + before.seconds)
        kept = [part for part in found.values() if abs(part.seconds) > _ROUNDING * measured]
        fall = Waterfall(measured, floor, tuple(sorted(kept, key=lambda part: -part.seconds)))
        return Explained(fall, tuple(sorted(operations, key=lambda one: -one.seconds)), bound)

    def share(self, name: str) -> float:
        """Which share of what was measured the part of that name has; 0 if there is none."""
        return sum(part.seconds for part in self.waterfall.parts if part.name == name) / self.waterfall.measured

    def seconds(self, *names: str) -> float:
        """Of the operations of these names."""
        return sum(one.seconds for one in self.operations if one.name in names)


@dataclass(frozen=True)
class StepTime:
    """One step. begin, end: seconds from the start of the run, of its work on the device. kind: in a mixed step some
    sequences have a token and others more; a training step has none. kv: the share of the KV memory that the step's
    sequences have; None where there is none."""

    begin: float
    end: float
    kind: StepWork | None
    tokens: int
    sequences: int
    kv: float | None = None


@dataclass(frozen=True)
class Phase:
    """Of one request: seconds from its arrival. parts: seconds of its ledger that the phase is the sum of."""

    name: str
    begin: float
    end: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Explanation:
    """Where the time of a run went and why.

    title: what ran, in words. device: as its driver or system names it; None where nobody told. operations: the longest
    first. steps: in their order. sources: of what was predicted, and of the floor, in words. peaks: None where the
    device's are not known. phases: of one request, in their order; none of a run.
    """

    title: str
    device: str | None
    waterfall: Waterfall
    verdict: Verdict
    operations: tuple[OperationTime, ...] = ()
    steps: tuple[StepTime, ...] = ()
    sources: tuple[str, ...] = ()
    peaks: Peaks | None = None
    phases: tuple[Phase, ...] = ()
