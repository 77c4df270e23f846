"""All-gather of small messages on CUDA, in one launch through an axis's symmetric memory."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from strata.comm.all_reduce_cuda import exchange, memory_of
from strata.comm.mesh import Axis
from strata.kernels.collective.all_reduce import block_tile, gather_rows_kernel
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
    words, shape = x.nbytes // _WORD, list(x.shape)
    shape[dim] *= axis.size
    result, tile = x.new_empty(shape), block_tile(words)
    sizes = words, _part_bytes(x, dim) // _WORD
    exchange(gather_rows_kernel, ceil_div(words, tile[0]), axis, (x, result), sizes, tile)
    return result


def _part_bytes(x: Tensor, dim: int) -> int:
    """What stands together in the result: the dimension and all behind it."""
    return math.prod(x.shape[dim % x.dim() :]) * x.itemsize
