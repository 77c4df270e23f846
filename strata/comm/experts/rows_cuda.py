"""Rows on their way to experts and back on CUDA, in one launch through an axis's symmetric memory each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata.comm.all_gather_cuda import one_shot_gather
from strata.comm.all_reduce_cuda import beside_the_kernel_ahead, fits_one_shot, memory_of, needed_memory
from strata.comm.mesh import Axis
from strata.kernels.collective.all_reduce import block_tile
from strata.kernels.collective.rows import scatter_sums_kernel
from strata.kernels.grid_sizes import ceil_div

_WORD = 4


def fits_gather(x: Tensor, axis: Any) -> bool:
    """A rank sends its rows to all, as in `one_shot`."""
    return fits_one_shot(x, axis)


def fits_scatter(x: Tensor, axis: Any) -> bool:
    """A rank sends each other one the rows of that one, each as many words."""
    memory = memory_of(axis)
    if memory is None or len(x) % memory.ranks or not x.is_contiguous():
        return False
    return fits_one_shot(x[: len(x) // memory.ranks], axis)


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    return one_shot_gather(x, axis, 0)


def scatter_sums(x: Tensor, axis: Axis) -> Tensor:
    result = x.new_empty((len(x) // axis.size, *x.shape[1:]))
    memory, words = needed_memory(axis), result.nbytes // _WORD
    block, warps = block_tile(words)
    scatter_sums_kernel[(ceil_div(words, block),)](
        x,
        result,
        memory.inbox,
        memory.peers,
        memory.counters,
        words,
        axis.index,
        **beside_the_kernel_ahead(x, memory, block, warps),
    )
    return result
