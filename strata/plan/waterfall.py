"""Where the time of a run goes, from what was measured down to the floor, and the verdict that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Layer = Literal["kernel", "graph", "system"]
Cause = Literal[
    "compute",
    "memory",
    "communication",
    "launch",
    "host",
    "queueing",
    "scheduling",
    "padding",
    "preemption",
    "compilation",
    "power",
]
LAYERS: tuple[Layer, ...] = get_args(Layer)
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True)
class Part:
    """Seconds of a run beyond its floor, in which layer they are lost and to what. name: for people."""

    name: str
    layer: Layer
    cause: Cause
    seconds: float


@dataclass(frozen=True)
class Waterfall:
    """From the measured seconds of a run down to its floor: the parts and the floor add up to what was measured."""

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


@dataclass(frozen=True)
class Remedy:
    """What to do, as an option of Strata where there is one, and which share of the measured time it is predicted to
    save."""

    what: str
    gain: float
    option: str = ""


@dataclass(frozen=True)
class Verdict:
    """What holds a run back. evidence: figures in words. remedies: the greatest gain first."""

    layer: Layer
    symptom: str
    cause: Cause
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        advice = f"; {self.remedies[0].what} saves {self.remedies[0].gain:.0%}" if self.remedies else ""
        return f"{self.layer}: {self.symptom} ({self.cause}){advice}"
