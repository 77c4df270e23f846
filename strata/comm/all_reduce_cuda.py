"""All-reduce of small messages on CUDA through an axis's symmetric memory, alone or with the norm that follows.

All-gather of small messages on CUDA, in one launch through an axis's symmetric memory.

A product of few rows, its sum over ranks and the norm of that on CUDA, in two launches: one sends, one receives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.comm.symmetric import InboxLayout, SymmetricMemory
from strata.kernels.choose import thresholds
from strata.kernels.collective.all_reduce import (
    PACKETS,
    PROGRAMS,
    TWO_SHOT_TILE,
    TWO_SHOT_WORDS,
    block_tile,
    gather_rows_kernel,
    one_shot_kernel,
    one_shot_norm_kernel,
    row_tile,
    two_shot_kernel,
)
from strata.kernels.collective.gemm_all_reduce import one_shot_received_norm_kernel
from strata.kernels.collective.one_shot_flags import FLAG_PROGRAMS, fits_inbox, flag_norm_kernel
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.linear import linear
from strata.kernels.linear.small_m import Inboxes, SmallMProduct, kernels_of, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.linear.tile_rule import chosen_tile

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WORD = 4


def memory_of(axis: Any) -> SymmetricMemory | None:
    """An axis's symmetric memory, if it is one that has some."""
    return axis.symmetric if isinstance(axis, Axis) else None


def fits_one_shot(x: Tensor, axis: Any) -> bool:
    """Beyond it, that two shots send less outweighs that they wait twice."""
    memory = memory_of(axis)
    return memory is not None and _has_words(x) and x.nbytes <= thresholds(x.device).one_shot_bytes[memory.ranks]


def fits_two_shot(x: Tensor, axis: Any) -> bool:
    return memory_of(axis) is not None and _has_words(x) and x.nbytes <= TWO_SHOT_WORDS * _WORD


def fits_one_shot_norm(x: Tensor, axis: Any, residual: Tensor, weight: Tensor, eps: float) -> bool:
    """A program sends one row, and there are no more rows than programs."""
    if not _has_rows(x, axis, residual, weight) or x.shape[0] > PROGRAMS:
        return False
    return x.nbytes <= thresholds(x.device).one_shot_norm_bytes


def fits_flag_norm(x: Tensor, axis: Any, residual: Tensor, weight: Tensor, eps: float) -> bool:
    """With more ranks, what it sends to each of them outweighs what two shots wait."""
    memory = memory_of(axis)
    return (
        memory is not None
        and x.nbytes <= thresholds(x.device).flagged_bytes.get(memory.ranks, 0)
        and _has_rows(x, axis, residual, weight)
        and fits_inbox(x.shape[0], x.shape[1] * x.itemsize // _WORD)
    )


def _has_rows(x: Tensor, axis: Any, residual: Tensor, weight: Tensor) -> bool:
    """Whether a program can take a row at once."""
    return (
        memory_of(axis) is not None
        and x.dim() == 2
        and x.shape == residual.shape
        and x.dtype == residual.dtype == weight.dtype
        and _has_words(x)
        and x.shape[1] * x.itemsize <= PACKETS * _WORD
        and x.shape[1] * x.itemsize % 16 == 0
        and residual.stride(1) == 1
        and residual.stride(0) * residual.itemsize % 16 == 0
    )


def _has_words(x: Tensor) -> bool:
    return x.dtype in _DTYPES and x.is_contiguous() and x.nbytes % _WORD == 0 and x.numel() > 0


def one_shot(x: Tensor, axis: Axis) -> Tensor:
    words, result = x.nbytes // _WORD, torch.empty_like(x)
    tile = block_tile(words)
    exchange(one_shot_kernel, ceil_div(words, tile[0]), axis, (x, result), (words,), tile)
    return result


def two_shot(x: Tensor, axis: Axis) -> Tensor:
    words, result = x.nbytes // _WORD, torch.empty_like(x)
    ranks = needed_memory(axis).ranks
    layout = InboxLayout.of(ranks)
    programs = min(PROGRAMS, ceil_div(words, ranks * TWO_SHOT_TILE[0]))
    span = 16 * ceil_div(words, ranks * programs * 16)
    sizes = words, span, layout.first, layout.second, layout.flags
    exchange(two_shot_kernel, programs, axis, (x, result), sizes, TWO_SHOT_TILE, counters=1, early=False)
    return result


def one_shot_norm(x: Tensor, axis: Axis, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    words, total, result = x.shape[1] * x.itemsize // _WORD, torch.empty_like(x), torch.empty_like(x)
    sizes = words, residual.stride(0) * residual.itemsize // _WORD, words, x.shape[1], eps
    tensors = x, residual, weight, total, result
    exchange(one_shot_norm_kernel, x.shape[0], axis, tensors, sizes, row_tile(words))
    return total, result


def flag_norm(x: Tensor, axis: Axis, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    words, total, result = x.shape[1] * x.itemsize // _WORD, torch.empty_like(x), torch.empty_like(x)
    layout, (rows, width) = InboxLayout.of(needed_memory(axis).ranks), x.shape
    strides = words, residual.stride(0) * residual.itemsize // _WORD
    sizes = *strides, rows, words, width, layout.flagged, layout.flags_behind, eps
    tensors, programs = (x, residual, weight, total, result), min(FLAG_PROGRAMS, rows)
    exchange(flag_norm_kernel, programs, axis, tensors, sizes, row_tile(words), counters=2)
    return total, result


def exchange(
    kernel: Any,
    programs: int,
    axis: Axis,
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    tile: tuple[int, int],
    counters: int = 0,
    early: bool = True,
    **constants: bool,
) -> None:
    """Launch programs that send to those of all ranks of an axis and hear from them. tensors, sizes: arguments that
    are the kernel's own, before and behind those of symmetric memory; tile: words and warps of a program; counters:
    which of the memory's; early: the kernel may start before the one ahead has ended, for which it waits itself."""
    memory = needed_memory(axis)
    options = beside_the_kernel_ahead(tensors[0], memory, *tile)
    if not early:
        del options["EARLY"], options["launch_pdl"]
    own = memory.counters[counters] if counters else memory.counters
    kernel[(programs,)](*tensors, memory.inbox, memory.peers, own, *sizes, axis.index, **options, **constants)


def beside_the_kernel_ahead(x: Tensor, memory: SymmetricMemory, block: int, warps: int) -> dict[str, Any]:
    """Options of a launch before the kernel ahead has ended, on devices that have programmatic dependent launch."""
    early = x.device.type != "cpu" and DeviceLimits.of(x.device).capability >= (9, 0)
    return {
        "WORLD": memory.ranks,
        "EARLY": early,
        "BLOCK": block,
        "num_warps": warps,
        "num_stages": 1,
        "launch_pdl": early,
    }


def needed_memory(axis: Axis) -> SymmetricMemory:
    """Of an axis that has some. Raises ValueError if it has none."""
    memory = axis.symmetric
    if memory is None:
        raise ValueError(f"the axis {axis.name} has no symmetric memory; give it some by with_symmetric_memory")
    return memory


# The largest message of a rank: the keys of draws and the like, which wait for the others and move nothing to speak of.
GATHERED_BYTES = 1 << 16


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


def fits_gemm_reduce(x: Tensor, axis: Any, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> bool:
    """Each program has whole sums to send, and a program of the receiver takes a row at once."""
    if x.dim() != 2 or x.shape[0] > thresholds(x.device).sent_rows or residual.dtype != x.dtype:
        return False
    tile = _tile(x, weight)
    return (
        tile is not None
        and tile.splits == 1
        and fits_one_shot_norm(linear.meta(x, weight), axis, residual, norm_weight, eps)
    )


def gemm_all_reduce_norm(
    x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    memory, tile = needed_memory(axis), _tile(x, weight)
    assert tile is not None
    rows, width = residual.shape
    words = width * x.itemsize // _WORD
    # Neither may lie where the product still reads x while the first rows are received.
    total, result = x.new_empty(residual.shape), x.new_empty(residual.shape)
    beside = beside_the_kernel_ahead(x, memory, *row_tile(words))
    inboxes = Inboxes(memory.peers, memory.counters, axis.index, starts_receiver=beside["EARLY"])
    multiply(SmallMProduct(x, weight, inboxes=inboxes), tile)
    one_shot_received_norm_kernel[(rows,)](
        residual,
        norm_weight,
        total,
        result,
        memory.inbox,
        memory.counters,
        residual.stride(0) * residual.itemsize // _WORD,
        words,
        width,
        eps,
        **beside,
    )
    return total, result


def gemm_all_reduce_kernels(x: Tensor, axis: Any, weight: Tensor, *_: Any) -> tuple[Any, ...]:
    tile = _tile(x, weight)
    assert tile is not None
    return (*kernels_of(tile, weight), one_shot_received_norm_kernel)


def _tile(x: Tensor, weight: Tensor) -> SmallMTile | None:
    """That of the product alone, so that its bits are the same."""
    return chosen_tile(linear.name, x, weight)
