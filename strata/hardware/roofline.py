"""What a piece of work costs and the least time a device can take for it (the roofline, Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import add, sub

from strata.hardware.figures import Device
from strata.hardware.links import Link


@dataclass(frozen=True)
class Cost:
    """The work of one operation, counted from shapes alone.

    `flops` are floating-point operations (a multiply-add is two). `read` and `written` are the fewest bytes the
    operation must move through device memory: each input read once, each output written once. `weights` is the part of
    `read` that is parameters; `cached` the part of `bytes` that is keys and values of the sequences, each once.
    `messages` are the collectives of a rank, one after another, each of which takes at least one way of a message, and
    `sent` the fewest bytes that it sends in them; it receives as many.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    weights: int = 0
    cached: int = 0
    messages: int = 0
    sent: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def in_step(self) -> Cost:
        """What is left in a step whose activations stay on the chip: weights, cached keys and values, messages."""
        return replace(self, read=self.weights + self.cached, written=0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, self._counts, other._counts))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(sub, self._counts, other._counts))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.flops, self.read, self.written, self.weights, self.cached, self.messages, self.sent


@dataclass(frozen=True)
class Workload:
    """The sequences of one step: for each, how many tokens run now and how many it has once they have run."""

    new: tuple[int, ...]
    total: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.new)


@dataclass(frozen=True)
class Floor:
    """The least time for some work on a device, in seconds, and which of its parts sets it."""

    compute: float
    memory: float
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.communication)

    @property
    def bound(self) -> str:
        """ "compute", "memory" or "communication"."""
        if self.communication > max(self.compute, self.memory):
            return "communication"
        return "compute" if self.compute > self.memory else "memory"


def floor(cost: Cost, device: Device, dtype: str, link: Link | None = None) -> Floor:
    """The roofline: `cost.flops` at the device's rate for `dtype`, against `cost.bytes` at its memory bandwidth, and
    against `cost.messages` and `cost.sent` on `link`, which take no time without one.

    Rates are measured where the database has them. Raises ValueError if it has none for `dtype`.
    """
    compute = device.ceiling("compute", dtype).value
    communication = 0.0 if link is None else link.min_seconds(cost.messages, cost.sent)
    return Floor(cost.flops / compute, cost.bytes / device.ceiling("bandwidth").value, communication)


def steps_floor(steps: Iterable[Cost], device: Device, dtype: str, link: Link | None = None) -> float:
    """Seconds of steps that run one after the other, each at its own floor; no launch, host or sampling cost."""
    return sum(floor(step, device, dtype, link).seconds for step in steps)
