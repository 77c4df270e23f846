"""The observer of a rank's collectives, so that a run that hangs can say in which one."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CollectiveCall(NamedTuple):
    """One collective on one rank. ranks: of the world, those along the axis. nbytes: of the tensor that is handed in.

    number: of the collectives that this rank has started along this axis, from 1. Since all ranks of an axis start the
    same ones in the same order, a number means the same collective on all of them.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    number: int
    nbytes: int


class Observer(Protocol):
    """Called by `strata.comm.collectives` on the host; on a GPU the collective itself runs later.

    What torch.compile traces and what a CUDA graph replays is not reported. That is so on all ranks of an axis alike,
    and the numbers stay comparable.
    """

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        """A collective was started."""

    def waits(self, call: CollectiveCall | None) -> None:
        """The host waits for this one from now on; None: no longer."""
