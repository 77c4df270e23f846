"""Where the time of a run goes, from what was measured down to the floor, and the verdict that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.engine.watch.verdict import CAUSES, LAYERS, Cause, Layer, Remedy, Verdict

__all__ = ["CAUSES", "LAYERS", "Cause", "Layer", "Part", "Remedy", "Verdict", "Waterfall"]


@dataclass(frozen=True)
class Part:
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
    parts: tuple[Part, ...]

    @property
    def unexplained(self) -> float:
        """Seconds that no part tells of; negative where parts tell of too many."""
        return self.measured - self.floor - math.fsum(part.seconds for part in self.parts)

    def seconds(self, *, layer: Layer | None = None, cause: Cause | None = None) -> float:
        """Of the parts of a layer, or cause, or both."""
        return math.fsum(
            part.seconds for part in self.parts if layer in (None, part.layer) and cause in (None, part.cause)
        )
