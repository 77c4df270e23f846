"""A predicted time and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
        sizes = [work for work, _ in calls]
        if len(set(sizes)) < 2:
            return None
        start, each = nonnegative_fit([[1 / seconds, work / seconds] for work, seconds in calls])
        return FittedTimes(float(start), float(each), min(sizes), max(sizes))

    def predict(self, work: float) -> Prediction:
        """Interpolated within what was measured, analytic beyond it."""
        return Prediction(self.start + self.each * work, self._origin(work))

    def _origin(self, work: float) -> str:
        return "interpolated" if self.least <= work <= self.most else "analytic"


def nonnegative_fit(rows: ArrayLike, wanted: ArrayLike = 1.0) -> NDArray[np.float64]:
    """The coefficients of the columns, none of them negative, with which each row comes nearest to what is wanted of
    it: least squares without the columns whose coefficients would be negative, the most negative left out first."""
    matrix = np.asarray(rows, dtype=np.float64)
    targets, scale = np.broadcast_to(wanted, len(matrix)), np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    used, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while used:
        each = np.linalg.lstsq(matrix[:, used] / scale[used], targets, rcond=None)[0]
        if (each >= 0).all():
            found[used] = each / scale[used]
            break
        used.pop(int(each.argmin()))
    return found
