"""What holds an engine back: the values of every verdict, and the rules of the one that a server gives while it runs.

They lie here because the engine process makes its own verdict, and no floor below `plan` can import from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from strata.engine.scheduling.config import Holdup

Layer = Literal["kernel", "graph", "system"]
Bound = Literal["compute", "memory", "communication"]
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
    "unknown",
]
"""unknown: steps are over their floor, and nothing that was measured tells of what they are made."""
LAYERS: tuple[Layer, ...] = get_args(Layer)


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
    def gain(self) -> float:
        """What the best remedy saves."""
        return self.remedies[0].gain if self.remedies else 0.0

    @property
    def line(self) -> str:
        """The verdict in one line."""
        advice = f"; {self.remedies[0].what} saves {self.remedies[0].gain:.0%}" if self.remedies else ""
        return f"{self.layer}: {self.symptom} ({self.cause}){advice}"


Finding = Literal[
    "host gaps", "grammar masks", "launches", "recomputation", "compilation", "KV pages", "slots", "prompts",
    "slow steps", "near the floor", "working",
]  # fmt: skip
"""host gaps: between steps the device waits for the host. grammar masks: steps wait for them. launches: the host
launches steps kernel by kernel. recomputation: of sequences whose pages were taken. compilation: a kernel was compiled
while requests waited. KV pages, slots, prompts: requests wait for pages, for slots, for prompts of others that fill the
steps. slow steps: they are far from their floor. near the floor: they are not. working: their floor is not known, and
nothing else is found.
"""
FINDINGS: tuple[Finding, ...] = get_args(Finding)

# What costs less of the time is no bottleneck.
MIN_SHARE = 0.1
# Requests wait for the same thing in so much of the time: it is what holds them.
HELD_SHARE = 0.5
# Of the floor that good kernels reach.
NEAR = 0.6

_HELD: Mapping[Holdup, Finding] = {"pages": "KV pages", "slot": "slots", "step_full": "prompts"}


class Standing(NamedTuple):
    """The finding of a running engine, with its layer and cause; no remedy, since nothing was tried."""

    finding: Finding
    layer: Layer
    cause: Cause


class Shares(NamedTuple):
    """Parts of the time in which an engine had something to do, each in [0, 1].

    gap, masks, recomputed: see `Finding`; launches: what steps that the host launched took beyond their floor, where
    the device had done them before the host had launched the next. held: in which the first in line waited for that.
    floor: the floors of all steps; None where they are not known. bound: what sets most of it. compiled: kernels, not a
    share.
    """

    gap: float = 0.0
    masks: float = 0.0
    recomputed: float = 0.0
    launches: float = 0.0
    held: Mapping[Holdup, float] = {}
    floor: float | None = None
    bound: Bound = "memory"
    compiled: int = 0


def standing(shares: Shares) -> Standing:
    """The finding that costs the device the most time; if none does, what requests wait for; else how good its steps
    are."""
    lost = max(_losses(shares), key=lambda one: one[0])
    if shares.compiled and lost[0] < HELD_SHARE:
        return Standing("compilation", "kernel", "compilation")
    if lost[0] >= MIN_SHARE:
        return lost[1]
    waits = [cause for cause in _HELD if shares.held.get(cause, 0.0) >= HELD_SHARE]
    if waits:
        cause: Cause = "scheduling" if waits[0] == "step_full" else "queueing"
        return Standing(_HELD[waits[0]], "system", cause)
    if shares.floor is None:
        return Standing("working", "system", "scheduling")
    return Standing("near the floor" if shares.floor >= NEAR else "slow steps", "kernel", shares.bound)


def _losses(shares: Shares) -> Iterator[tuple[float, Standing]]:
    yield shares.gap, Standing("host gaps", "system", "host")
    yield shares.masks, Standing("grammar masks", "system", "host")
    yield shares.recomputed, Standing("recomputation", "system", "preemption")
    yield shares.launches, Standing("launches", "graph", "launch")
