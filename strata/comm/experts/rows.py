"""Rows of tokens on their way to experts and back, where each rank has tokens of its own, as operations of a graph.

All ranks bring equally many rows and get all rows of all ranks: which expert a row goes to is computed behind the
message, so nothing but rows travels. For how they run see `strata.comm.operations`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata.comm import collectives
from strata.comm.all_reduce_cuda import exchange, fits_one_shot, memory_of, one_shot_gather
from strata.comm.cost import all_gather_cost
from strata.comm.mesh import Axis
from strata.comm.operations import Along, by_library, in_rank_order, live, reduce_scatter
from strata.hardware.roofline import Cost, Workload
from strata.kernels.collective.all_reduce import block_tile, gather_rows_kernel, one_shot_kernel
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation

_WORD = 4


def _fits_scatter(x: Tensor, axis: Any) -> bool:
    """A rank sends each other one the rows of that one, each as many words."""
    memory = memory_of(axis)
    if memory is None or len(x) % memory.ranks or not x.is_contiguous():
        return False
    return fits_one_shot(x[: len(x) // memory.ranks], axis)


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    return one_shot_gather(x, axis, 0)


def scatter_sums(x: Tensor, axis: Axis) -> Tensor:
    result = x.new_empty((len(x) // axis.size, *x.shape[1:]))
    words = result.nbytes // _WORD
    tile = block_tile(words)
    exchange(one_shot_kernel, ceil_div(words, tile[0]), axis, (x, result), (words,), tile, SCATTERED=True)
    return result


def _of_all_ranks(x: Tensor, along: Along | Axis) -> Tensor:
    return x.new_empty((x.shape[0] * along.size, *x.shape[1:]), device="meta")


def _dispatch_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    if along.size == 1:
        return Cost()
    result = x.nbytes * along.size
    return Cost(read=x.nbytes, written=result, messages=1, sent=all_gather_cost(result, along.size).bytes)


# Rows that every rank leaves out are missing from the result and change no other, so both are rowwise.
@operation(_dispatch_cost, meta=_of_all_ranks, rowwise=True, collective=True)
def dispatch_rows(x: Tensor, along: Along | Axis) -> Tensor:
    """The rows of all ranks, one rank's after another's: [rows, ...] to [ranks * rows, ...]. All have equally many."""
    return x if along.size == 1 else collectives.all_gather(x, live(along), 0)


def _own_rows(x: Tensor, along: Along | Axis) -> Tensor:
    rows = collectives.shard_size(x.shape[0], along.size, along.name)
    return x.new_empty((rows, *x.shape[1:]), device="meta")


def _combine_cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    return reduce_scatter.cost(x, along, 0, workload=workload)


@operation(_combine_cost, meta=_own_rows, rowwise=True, collective=True)
def combine_rows(x: Tensor, along: Along | Axis) -> Tensor:
    """What `dispatch_rows` brought goes back: this rank's rows of the sum of x over the ranks, [ranks * rows, ...] to
    [rows, ...].

    Added up as in `all_reduce`. Raises ValueError if the rows are no multiple of the number of ranks.
    """
    summed: Tensor = reduce_scatter.reference(x, along, 0)
    return summed


def _combined_by_library(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else collectives.reduce_scatter(x, live(axis), 0)


dispatch_rows.in_triton(gather_rows, "one shot", invariant=True, supports=fits_one_shot, kernels=(gather_rows_kernel,))
combine_rows.in_triton(scatter_sums, "one shot", invariant=True, supports=_fits_scatter, kernels=(one_shot_kernel,))
by_library(dispatch_rows, invariant=True)
by_library(combine_rows, _combined_by_library)
in_rank_order(combine_rows)
