"""Collectives as operations of a graph: captured, costed and drawn without a process group, then bound to an axis.

Until a graph is bound, an axis is its name and size (`Along`); `strata.graph.bind` puts the live `Axis` in its place.
Each returns a new tensor, and along an axis of one rank its argument. All ranks of an axis run the same ones in the
same order. For gradients see `strata.comm.collectives`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.cost import CollectiveCost, all_gather_cost, all_reduce_cost
from strata.comm.mesh import Axis
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import ATEN, NCCL, operation


class Along(NamedTuple):
    """The axis of a collective in a graph that is not bound: its name and how many ranks it has."""

    axis: str
    size: int


def live(along: Along | Axis) -> Axis:
    """The axis itself, where a collective runs. Raises TypeError for one that is only named."""
    if isinstance(along, Axis):
        return along
    raise TypeError(
        f"a collective along {along.axis!r} was called with the name of its axis; bind the graph with "
        f"axes={{{along.axis!r}: ...}} or hand it an Axis of strata.comm.mesh"
    )


def _cost(sent: CollectiveCost, flops: int, read: int, written: int) -> Cost:
    return Cost(flops=flops, read=read, written=written, messages=sent.messages, sent=sent.bytes)


def _reduce_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    if along.size == 1:
        return Cost()
    additions = x.numel() * (along.size - 1) // along.size  # of the ring: each rank adds up its part
    return _cost(all_reduce_cost(x.nbytes, along.size), additions, x.nbytes, x.nbytes)


@operation(_reduce_cost, rowwise=True, collective=True)
def all_reduce(x: Tensor, along: Along | Axis) -> Tensor:
    """The sum of x over the ranks, of its shape and dtype, on all of them.

    Added up in the order of the ranks, in float32 (float64 for float64), and rounded once.
    """
    if along.size == 1:
        return x
    parts = collectives.start_all_gather(x.contiguous().unsqueeze(0), live(along)).wait()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


def _all_reduce_by_library(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else collectives.all_reduce(x, live(axis))


all_reduce.implement("gloo", "cpu", differentiable=True)(_all_reduce_by_library)
all_reduce.implement("nccl", "cuda", differentiable=True, kernels=(ATEN, NCCL))(_all_reduce_by_library)
all_reduce.implement("in rank order", "cpu", invariant=True)(all_reduce.reference)
all_reduce.implement("in rank order", "cuda", invariant=True, kernels=(NCCL, ATEN))(all_reduce.reference)


def _gathered(x: Tensor, along: Along | Axis, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[_columns(x, dim)] *= along.size
    return x.new_empty(shape, device="meta")


def _columns(x: Tensor, dim: int) -> int:
    """The dimension, counted from the first. Raises ValueError for that of the rows."""
    if dim % x.dim() == 0:
        raise ValueError(
            f"all_gather along dimension {dim} of {list(x.shape)} would mix rows; gather a later dimension"
        )
    return dim % x.dim()


def _gather_cost(x: Tensor, along: Along | Axis, dim: int, *, workload: Workload) -> Cost:
    if along.size == 1:
        return Cost()
    result = x.nbytes * along.size
    return _cost(all_gather_cost(result, along.size), 0, x.nbytes, result)


@operation(_gather_cost, meta=_gathered, rowwise=True, collective=True)
def all_gather(x: Tensor, along: Along | Axis, dim: int) -> Tensor:
    """The tensors of all ranks, of one shape, one after another along `dim`, which is not the first.

    Raises ValueError for the first dimension, whose rows it would mix.
    """
    dim = _columns(x, dim)
    return x if along.size == 1 else collectives.all_gather(x, live(along), dim)


all_gather.implement("gloo", "cpu", invariant=True, differentiable=True)(all_gather.reference)
all_gather.implement("nccl", "cuda", invariant=True, differentiable=True, kernels=(ATEN, NCCL))(all_gather.reference)
