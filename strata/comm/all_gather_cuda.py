"""All-gather of small messages on CUDA, in one launch through an axis's symmetric memory."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from strata.comm.all_reduce_cuda import beside_the_kernel_ahead, memory_of, needed_memory
from strata.comm.mesh import Axis
from strata.kernels.collective.all_reduce import block_tile
from strata.kernels.collective.rows import gather_rows_kernel
from strata.kernels.grid_sizes import ceil_div

# The largest message of a rank: the keys of draws and the like, which wait for the others and move nothing to speak of.
GATHERED_BYTES = 1 << 16
_WORD = 4


def fits_one_shot_gather(x: Tensor, axis: Any, dim: int) -> bool:
    """What a rank has of each row travels as it is, whatever its dtype, in words of 4 bytes."""
    return (
        memory_of(axis) is not None
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and 0 < x.nbytes <= GATHERED_BYTES
        and _part_bytes(x, dim) % _WORD == 0
    )


def one_shot_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The tensors of all ranks one after another along any dimension, the first too."""
    memory, words = needed_memory(axis), x.nbytes // _WORD
    shape = list(x.shape)
    shape[dim] *= axis.size
    result = x.new_empty(shape)
    block, warps = block_tile(words)
    gather_rows_kernel[(ceil_div(words, block),)](
        x,
        result,
        memory.inbox,
        memory.peers,
        memory.counters,
        words,
        _part_bytes(x, dim) // _WORD,
        axis.index,
        **beside_the_kernel_ahead(x, memory, block, warps),
    )
    return result


def _part_bytes(x: Tensor, dim: int) -> int:
    """What stands together in the result: the dimension and all behind it."""
    return math.prod(x.shape[dim % x.dim() :]) * x.itemsize
