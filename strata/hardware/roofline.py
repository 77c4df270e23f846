"""What a piece of work costs and the least time a device can take for it (the roofline, Williams et al. 2009)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The work of one operation, counted from shapes alone.

    `flops` are floating-point operations (a multiply-add is two). `read` and `written` are the fewest bytes the
    operation must move through device memory: each input read once, each output written once. `weights` is the part of
    `read` that is parameters.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    weights: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.read + other.read,
            self.written + other.written,
            self.weights + other.weights,
        )


@dataclass(frozen=True)
class Workload:
    """The sequences of one step: for each, how many tokens run now and how many it has once they have run."""

    new: tuple[int, ...]
    total: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.new)
