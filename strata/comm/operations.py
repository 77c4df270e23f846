"""Collectives as operations of a graph: traced, costed and drawn without a process group, then bound to an axis.

Until a graph is bound, an axis is its name and size (`Along`); `strata.graph.bind` puts the live `Axis` in its place.
Each returns a new tensor, and along an axis of one rank its argument. All ranks of an axis run the same ones in the
same order. For gradients see `strata.comm.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.all_reduce_cuda import (
    fits_one_shot,
    fits_one_shot_gather,
    fits_two_shot,
    one_shot,
    one_shot_gather,
    two_shot,
)
from strata.comm.collectives import Transfer, start_transfers
from strata.comm.cost import (
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    reduce_scatter_cost,
    shift_cost,
)
from strata.comm.mesh import Axis
from strata.hardware.roofline import Cost, Workload
from strata.kernels.collective.all_reduce import gather_rows_kernel, one_shot_kernel, two_shot_kernel
from strata.kernels.op import ATEN, NCCL, Kernels, Operation, operation
from strata.kernels.pairwise import pairwise_sum

# What the parts of all ranks may take at once: a long prompt's would take gigabytes.
_GATHERED_BYTES = 64 << 20


class Along(NamedTuple):
    """The axis of a collective in a graph that is not bound: its name and how many ranks it has."""

    axis: str
    size: int

    @property
    def name(self) -> str:
        """As an `Axis` calls it."""
        return self.axis


def live(along: Along | Axis) -> Axis:
    """The axis itself, where a collective runs. Raises TypeError for one that is only named."""
    if isinstance(along, Axis):
        return along
    raise TypeError(
        f"a collective along {along.axis!r} was called with the name of its axis; bind the graph with "
        f"axes={{{along.axis!r}: ...}} or hand it an Axis of strata.comm.mesh"
    )


def by_library(
    operation: Operation, run: Callable[..., Any] | None = None, kernels: Kernels = (NCCL,), **what: bool
) -> None:
    """Register what calls the communication library, the reference if nothing else. kernels: on CUDA."""
    operation.implement("gloo", "cpu", **what)(run or operation.definition)
    operation.implement("nccl", "cuda", kernels=kernels, **what)(run or operation.definition)


def in_rank_order(operation: Operation, name: str = "in rank order") -> None:
    """Register the reference, which gathers and then adds up itself."""
    operation.by_definition("cpu", name=name, invariant=True)
    operation.by_definition("cuda", name=name, invariant=True, kernels=(NCCL, ATEN))


def _cost(sent: CollectiveCost, flops: int, read: int, written: int) -> Cost:
    return Cost(flops=flops, read=read, written=written, messages=1, sent=sent.bytes)


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
    return _added(collectives.start_all_gather(x.contiguous().unsqueeze(0), live(along)).wait())


def _added(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in order, in float32 (float64 for float64), rounded once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _all_reduce_by_library(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else collectives.all_reduce(x, live(axis))


# Both have the bits of the reference.
all_reduce.in_triton(one_shot, "one shot", invariant=True, supports=fits_one_shot, kernels=(one_shot_kernel,))
all_reduce.in_triton(two_shot, "two shots", invariant=True, supports=fits_two_shot, kernels=(two_shot_kernel,))
by_library(all_reduce, _all_reduce_by_library, kernels=(ATEN, NCCL), differentiable=True)
in_rank_order(all_reduce)


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


_kernels = (gather_rows_kernel,)
all_gather.in_triton(one_shot_gather, "one shot", invariant=True, supports=fits_one_shot_gather, kernels=_kernels)
by_library(all_gather, kernels=(ATEN, NCCL), invariant=True, differentiable=True)


def _own_part(x: Tensor, along: Along | Axis, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = collectives.shard_size(shape[dim], along.size, along.name)
    return x.new_empty(shape, device="meta")


def _scatter_cost(x: Tensor, along: Along | Axis, dim: int, *, workload: Workload) -> Cost:
    if along.size == 1:
        return Cost()
    sent = reduce_scatter_cost(x.nbytes, along.size)
    return _cost(sent, x.numel() * (along.size - 1) // along.size, x.nbytes, x.nbytes // along.size)


@operation(_scatter_cost, meta=_own_part, collective=True)
def reduce_scatter(x: Tensor, along: Along | Axis, dim: int) -> Tensor:
    """This rank's part along `dim`, of as many as there are ranks, of the sum of x over the ranks.

    Added up as in `all_reduce`. Raises ValueError if the size of `dim` is no multiple of the number of ranks.
    """
    if along.size == 1:
        return x
    rows = x.movedim(dim, 0)
    count = collectives.shard_size(rows.shape[0], along.size, along.name)
    received = collectives.start_all_to_all(rows.contiguous(), live(along)).wait()
    return _added(received.unflatten(0, (along.size, count))).movedim(0, dim)


def _scattered_by_library(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x if axis.size == 1 else collectives.reduce_scatter(x, live(axis), dim)


by_library(reduce_scatter, _scattered_by_library, kernels=(ATEN, NCCL), differentiable=True)
in_rank_order(reduce_scatter)


def _exchange_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    if along.size == 1:
        return Cost()
    return _cost(all_to_all_cost(x.nbytes, along.size), 0, x.nbytes, x.nbytes)


@operation(_exchange_cost, collective=True)
def all_to_all(x: Tensor, along: Along | Axis) -> Tensor:
    """Equal parts of x's rows, one for each rank in their order, become the parts that all ranks have for this one.

    Raises ValueError if the rows are no multiple of the number of ranks.
    """
    collectives.shard_size(x.shape[0], along.size, along.name)
    return x if along.size == 1 else collectives.all_to_all(x, live(along))


by_library(all_to_all, invariant=True, differentiable=True)


def _pairwise_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    return all_reduce.cost(x, along, workload=workload)


@operation(_pairwise_cost, rowwise=True, collective=True)
def pairwise_all_reduce(x: Tensor, along: Along | Axis) -> Tensor:
    """`all_reduce` of float32 or float64, added up pairwise instead of one rank after the other.

    Of two ranks both are the same sum. Of more, this one has the bits of a sum over halves or quarters of the ranks,
    each of which holds what several hold here (`strata.kernels.pairwise`).
    """
    if along.size == 1:
        return x
    axis, result = live(along), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, _GATHERED_BYTES * len(x) // max(1, along.size * x.nbytes))
    for some, summed in zip(x.split(rows), result.split(rows), strict=True):
        parts = collectives.start_all_gather(some.contiguous().unsqueeze(0), axis).wait()
        summed.copy_(pairwise_sum(list(parts)))
    return result


in_rank_order(pairwise_all_reduce, "gathered")


def _send_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    sent = shift_cost(x.nbytes, along.size)
    return Cost(read=x.nbytes, messages=sent.messages, sent=sent.bytes)


@operation(_send_cost, collective=True)
def send_next(x: Tensor, along: Along | Axis) -> Tensor:
    """Send x to the rank after this one along the axis, which receives in the same order; returns x itself.

    Raises ValueError on the last rank.
    """
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


for _message in (send_next, receive_previous):
    by_library(_message, invariant=True)
