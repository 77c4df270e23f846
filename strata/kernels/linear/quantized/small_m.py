"""Which tile multiplies few rows (decoding) by a packed weight.

The rule is fitted to what those of 8B took on an H200 (`benchmarks.quantized_products --tiles`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.device_limits import MIN_CAPABILITY, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.linear.quantized.in_8_bits import takes_quantized_rows
from strata.kernels.linear.quantized.int4_gemv import in_chunks
from strata.kernels.linear.small_m_tiles import MAX_ROWS, SmallMTile
from strata.kernels.quant.dequantize import E4M3_CAPABILITY
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight
from strata.kernels.triton_import import HAS_TRITON

_SPLITS = (1, 2, 4, 8, 16)
# Warps that a processor should have, to have enough loads under way; of values in half a byte, which take more
# instructions, more, and twice as many if each has more columns than these.
_WARPS_EACH, _HALVES_WARPS_EACH, _LONG_PART = 3.5, 5.5, 2048
# The widest row that a program of `gemv_kernel` holds at once; two rows of x took it twice as long as one.
GEMV_WIDTH = 16384
# Larger weights are slower if they are launched early: their loads take the room of the kernel ahead. Smaller ones of
# groups load two at a time.
_SMALL_BYTES, _PREFETCH = 26 << 20, 512
# Sums of a thread that the last program of a tile may load at once, and turns of the loop over k that a split leaves.
_MAX_SUMS, _MIN_TURNS = 128, 4
# Programs of one row for each processor: above the second (gate and up of 8B) by int4 twice the columns each were 1 %
# faster in a chain of layers; by e4m3 between both (qkv and o) twice the columns brought T2 from 2.52 to 2.47 ms.
_FEW_PROGRAMS, _MANY_PROGRAMS = 3, 8


def in_order(weight: Tensor | QuantizedWeight) -> bool:
    """Whether the columns of its values are those of x, one by one."""
    return isinstance(weight, Tensor) or weight.order is None


def ordered(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """x [..., width] as the columns of the values are ordered."""
    return x if isinstance(weight, Tensor) or weight.order is None else x.index_select(-1, weight.order)


def chosen_tile(x: Tensor, weight: QuantizedWeight, most: int = MAX_ROWS) -> SmallMTile | None:
    """The tile for x [..., width] and a packed weight [out, width]; None for more rows than `most`, or where the
    kernels cannot take them."""
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= most or not readable(x, weight):
        return None
    return quantized_tile(rows, out, width, weight.kind, group_of(weight), DeviceLimits.of(x.device))


def max_rows(x: Tensor, weight: QuantizedWeight) -> int:
    """Up to so many rows arithmetic in 8 bits, where scheme and device have it, would not be faster."""
    rounded = takes_quantized_rows(weight, x.dtype, DeviceLimits.of(x.device))
    return thresholds(x.device).quantized_rows if rounded else MAX_ROWS


def group_of(weight: QuantizedWeight) -> int:
    """Columns that share a scale, 0: all, or none do."""
    return weight.columns if weight.columns < weight.shape[1] and weight.kind != TWO_OF_FOUR else 0


def readable(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether kernels can load these: 16-bit floats, and rows of values that start at multiples of 16 bytes."""
    values, scales, zeros = weight.values, weight.scales, weight.zeros
    return (
        HAS_TRITON
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % 16 == values.shape[1] % 16 == 0
        and values.stride(1) == x.stride(-1) == scales.stride(1) == 1
        and values.stride(0) % 16 == 0
        and (x.dim() < 2 or x.stride(-2) % 16 == 0)
        and x.data_ptr() % 16 == values.data_ptr() % 16 == 0
        and (zeros is None or (weight.kind == "int4" and zeros.stride() == scales.stride()))
        and (weight.row_scales is None or weight.row_scales.is_contiguous())
        and (weight.kind != TWO_OF_FOUR or values.dtype == x.dtype)
        and (weight.kind != "e4m3" or DeviceLimits.of(x.device).capability >= E4M3_CAPABILITY)
        # With these a four-bit float times its scale is exact.
        and (
            weight.kind != "e2m1" or (x.dtype == torch.bfloat16 and scales.dtype in (torch.uint8, torch.float8_e4m3fn))
        )
    )


@lru_cache(8192)
def quantized_tile(rows: int, out: int, width: int, kind: str, group: int, device: DeviceLimits) -> SmallMTile | None:
    """By the rule; None where columns that share a scale fit no block."""
    if device.capability < MIN_CAPABILITY:
        return None
    early = device.capability >= (9, 0)
    a_byte = kind in ("e4m3", "int8", TWO_OF_FOUR)  # or little more, for each column
    if a_byte and kind != TWO_OF_FOUR and not group and rows == 1 and width <= GEMV_WIDTH:
        return replace(_byte_tile(out, width, device), early=early)
    if kind == "int4" and rows == 1 and width <= GEMV_WIDTH and in_chunks(width, group):
        return replace(_int4_tile(out, width, device), early=early)
    found = dot_tiles(dot_shapes(rows)[0], rows, out, width, kind, group)
    if not found:
        return None
    # The first that has enough programs, else the one that has most.
    best = next((tile for tile in found if _fills(tile, rows, out, width, a_byte, device)), found[-1])
    starts_early = early and _nbytes(out, width, kind) <= _SMALL_BYTES
    return replace(best, early=True, prefetch=_PREFETCH if a_byte else 0) if starts_early else best


def _byte_tile(out: int, width: int, device: DeviceLimits) -> SmallMTile:
    """A thread has 128 bytes of the weight under way, or 256 where that leaves few programs, but enough."""
    block = max(2048, next_power_of_2(width))
    columns = 4 if block <= 8192 else 2
    if 4096 <= block <= 8192 and _FEW_PROGRAMS <= ceil_div(out, 2 * columns) / device.processors <= _MANY_PROGRAMS:
        columns *= 2
    return SmallMTile("gemv", columns, block, min(8, block // 1024))


def _int4_tile(out: int, width: int, device: DeviceLimits) -> SmallMTile:
    """A thread has 256 bytes of the weight under way: a chunk, or two or four, of as many rows as makes that."""
    block = max(1024, next_power_of_2(width))
    if block > 8192:
        return SmallMTile("gemv", 4, block, 4)
    if out >= 16 * _MANY_PROGRAMS * device.processors:
        return SmallMTile("gemv", 16, block, block // 1024)
    return SmallMTile("gemv", 8, block, max(1, block // 2048))


def _nbytes(out: int, width: int, kind: str) -> int:
    return out * width // (2 if kind in ("int4", "e2m1") else 1)


def _fills(tile: SmallMTile, rows: int, out: int, width: int, a_byte: bool, device: DeviceLimits) -> bool:
    programs = ceil_div(out, tile.columns) * ceil_div(rows, tile.program_rows(rows)) * tile.splits
    each = programs * tile.warps / device.processors
    if a_byte:
        return each >= _WARPS_EACH
    return each >= _HALVES_WARPS_EACH * (1 if width // tile.splits <= _LONG_PART else 2)


def dot_shapes(rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """For so many rows: columns, warps, stages and the most rows of a program.

    Warps of a program divide its columns, so that each value is converted once; two of them with 64 columns at most
    take `mma.sync`, whose left operand is in registers in the order in which bytes are loaded.
    """
    if rows <= 8:
        return ((32, 2, 4, 8), (64, 2, 4, 16))
    if rows <= 16:
        return ((64, 2, 4, 16), (64, 4, 4, 16))
    if rows <= 64:
        return ((64, 4, 4, 64),)
    return ((128, 8, 4, 128),)


def dot_tiles(
    shape: tuple[int, int, int, int], rows: int, out: int, width: int, kind: str, group: int
) -> list[SmallMTile]:
    """Those of a shape of `dot_shapes` for a weight [out, width]: few splits first; none where no block fits."""
    columns, warps, stages, most = shape
    block = _block_of(rows, out, width, kind, group)
    sums = columns * min(most, next_power_of_2(rows)) // (32 * warps)
    tiles = [SmallMTile("dot", columns, block or 1, warps, stages, splits, rows=most) for splits in _SPLITS]
    return [
        tile
        for tile in tiles
        if block
        and tile.fits(rows, out, width)
        and (tile.splits == 1 or (width // tile.splits >= _MIN_TURNS * block and tile.splits * sums <= _MAX_SUMS))
        and (not group or tile.splits == 1 or (width // tile.splits) % group == 0)
    ]


def _block_of(rows: int, out: int, width: int, kind: str, group: int) -> int:
    """Columns of a turn, which divide the width, within a group or whole groups; 0: none do."""
    # Long turns take shared memory that many rows have other uses for.
    several = group >= 128 and kind == "int4" and _nbytes(out, width, kind) <= _SMALL_BYTES
    longest = 256 if rows <= 16 and (several or not group) else 128
    # Of 2:4 eight columns are loaded as one value, and a product on tensor cores has 16 of these at least.
    least = 128 if kind == TWO_OF_FOUR else 32
    for block in (256, 128, 64, 32):
        # Groups of four-bit floats are within a block; each of integers is a block of its own, of which two are a turn.
        whole = not group or group % block == 0 or (block % group == 0 and (kind == "e2m1" or several))
        if least <= block <= longest and width % block == 0 and whole:
            return block
    return 0
