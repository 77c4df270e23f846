"""Times that grow with work alone: what a call takes to start, and a rate, fitted to measured calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.hardware.prediction import Prediction


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
