"""Messages between neighbouring stages of a pipeline, as operations of a graph (see `strata.comm.operations`).

What one stage sends the next receives, in the order in which they run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.comm.cost import shift_cost
from strata.comm.mesh import Axis
from strata.comm.operations import Along, live
from strata.comm.transfers import Transfer, start_transfers
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import NCCL, operation


def _send_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    sent = shift_cost(x.nbytes, along.size)
    return Cost(read=x.nbytes, messages=sent.messages, sent=sent.bytes)


@operation(_send_cost, collective=True)
def send_next(x: Tensor, along: Along | Axis) -> Tensor:
    """Send x to the rank after this one along the axis; returns x itself. Raises ValueError on the last rank."""
    axis = live(along)
    if axis.index + 1 == axis.size:
        raise ValueError(f"rank {axis.index} is the last of {axis.size} along {axis.name!r}: none comes after it")
    start_transfers([Transfer(x.contiguous(), axis.index, axis.index + 1)], axis).wait()
    return x


def _received(rows: Tensor, along: Along | Axis, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows.shape[0], width, dtype=dtype, device="meta")


def _receive_cost(rows: Tensor, along: Along | Axis, width: int, dtype: torch.dtype, *, workload: Workload) -> Cost:
    return Cost(written=rows.shape[0] * width * dtype.itemsize)


@operation(_receive_cost, meta=_received, collective=True)
def receive_previous(rows: Tensor, along: Along | Axis, width: int, dtype: torch.dtype) -> Tensor:
    """What the rank before this one along the axis sends, [rows, width] of `dtype`, of as many rows as `rows` has.

    Its message is counted where it is sent. Raises ValueError on the first rank.
    """
    axis = live(along)
    if axis.index == 0:
        raise ValueError(f"rank 0 is the first along {axis.name!r}: none comes before it")
    arrived = rows.new_empty((rows.shape[0], width), dtype=dtype)
    start_transfers([Transfer(arrived, axis.index - 1, axis.index)], axis).wait()
    return arrived


send_next.implement("gloo", "cpu", invariant=True)(send_next.reference)
send_next.implement("nccl", "cuda", invariant=True, kernels=(NCCL,))(send_next.reference)
receive_previous.implement("gloo", "cpu", invariant=True)(receive_previous.reference)
receive_previous.implement("nccl", "cuda", invariant=True, kernels=(NCCL,))(receive_previous.reference)
