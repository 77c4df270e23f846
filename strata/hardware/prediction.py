"""A predicted time and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Something measured: kind, dtype, shape, seconds (see `strata.cost.efficiency.KINDS`).
Call = tuple[str, str, tuple[int, ...], float]
# From the surest to the least sure.
ORIGINS = ("measured", "interpolated", "analytic")


@dataclass(frozen=True)
class Prediction:
    """seconds, and their origin: "measured" for this very shape, "interpolated" between measured shapes, or "analytic",
    from the roofline: nothing was measured, or only shapes that do not enclose this one.
    """

    seconds: float
    origin: str

    def __add__(self, other: Prediction) -> Prediction:
        """One after the other; as sure as the less sure of the two."""
        return Prediction(self.seconds + other.seconds, max(self.origin, other.origin, key=ORIGINS.index))

    def __mul__(self, count: int) -> Prediction:
        """So many times, one after the other."""
        return Prediction(self.seconds * count, self.origin)

    @staticmethod
    def total(predictions: Iterable[Prediction]) -> Prediction:
        """All of them, one after the other; nothing takes no time, which needs no measurement."""
        found = Prediction(0.0, ORIGINS[0])
        for one in predictions:
            found += one
        return found


@dataclass(frozen=True)
class FittedTimes:
    """A call of so much work takes `start` seconds and `each` more for a unit of it; measured were calls of `least` to
    `most` units.
    """

    start: float
    each: float
    least: float
    most: float

    @staticmethod
    def of(measured: Iterable[tuple[float, float]]) -> FittedTimes | None:
        """By least squares of relative errors, from (work, seconds); None if all calls are of the same work.

        A start below zero would make small calls take no time: then it is zero, and the rate is fitted alone.
        """
        calls = list(measured)
        if len({work for work, _ in calls}) < 2:
            return None
        # What is fitted to 1 for each call: start / seconds + each * work / seconds.
        starts, works = [1 / seconds for _, seconds in calls], [work / seconds for work, seconds in calls]
        squared, crossed, whole = _dot(starts, starts), _dot(starts, works), _dot(works, works)
        determinant = squared * whole - crossed**2
        start = (sum(starts) * whole - sum(works) * crossed) / determinant
        each = (sum(works) * squared - sum(starts) * crossed) / determinant
        if start < 0:
            start, each = 0.0, sum(works) / whole
        sizes = [work for work, _ in calls]
        return FittedTimes(start, each, min(sizes), max(sizes))

    def predict(self, work: float) -> Prediction:
        """Interpolated within what was measured, analytic beyond it."""
        return Prediction(self.start + self.each * work, self._origin(work))

    def _origin(self, work: float) -> str:
        return "interpolated" if self.least <= work <= self.most else "analytic"


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
