"""A predicted time and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Something measured: kind, dtype, shape, seconds (see `strata.hardware.efficiency.KINDS`).
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
