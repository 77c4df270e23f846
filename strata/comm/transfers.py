"""Transfers from one rank of an axis to another, several in one message to the communication library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from strata.comm.mesh import Axis
from strata.comm.observer import CollectiveCall


@dataclass(frozen=True)
class Transfer:
    """tensor: what is sent, contiguous, or where it arrives. source, target: places along the axis, one of them own."""

    tensor: Tensor
    source: int
    target: int


@dataclass(frozen=True)
class PendingTransfers:
    """Transfers under way. None of their tensors may be touched before `wait`."""

    transfers: tuple[Transfer, ...]  # keeps what is sent
    works: tuple[dist.Work, ...]
    axis: Axis
    calls: tuple[CollectiveCall, ...]

    def wait(self) -> None:
        """Until all have ended. On a GPU the stream waits, not the host."""
        observer = self.axis.observer
        if observer is not None:
            observer.waits(self.calls[0])
        for number, work in enumerate(self.works):
            if observer is not None and len(self.works) == len(self.calls):  # NCCL has one work for all
                observer.waits(self.calls[number])
            work.wait()
        if observer is not None:
            observer.waits(None)


def start_transfers(transfers: Sequence[Transfer], axis: Axis) -> PendingTransfers:
    """Begin them all. The two ranks of a transfer start those between them in one order."""
    operations = []
    calls = []
    for one in transfers:
        sends = one.source == axis.index
        peer = axis.ranks[one.target if sends else one.source]
        operations.append(dist.P2POp(dist.isend if sends else dist.irecv, one.tensor, peer, axis.group))
        if axis.observer is not None:
            ranks = axis.ranks[one.source], axis.ranks[one.target]
            calls.append(axis.observer.started("transfer", axis.name, ranks, one.tensor.nbytes))
    works = dist.batch_isend_irecv(operations)
    return PendingTransfers(tuple(transfers), tuple(works), axis, tuple(calls))
