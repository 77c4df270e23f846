"""What the start of an engine asks of the other ranks; of an engine of one rank, nothing."""

from __future__ import annotations

from typing import Protocol

import torch

from strata.comm.mesh import Axis


class Rank(Protocol):
    """The place of this process among the ranks of an engine.

    index: from 0 to size - 1; rank 0 schedules.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def least(self, value: int) -> int:
        """The least that any rank tells; all call this in one order, and none goes on before all have. Raises
        EngineFault if one has ended."""

    def join(self, device: torch.device) -> Axis:
        """The axis "tp" of all ranks, once all have called this."""


class OneRank:
    """A process alone."""

    index, size = 0, 1

    def least(self, value: int) -> int:
        return value

    def join(self, device: torch.device) -> Axis:
        return Axis("tp", 1, 0, (0,), None)
