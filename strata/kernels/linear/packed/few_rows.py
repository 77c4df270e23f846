"""Products of few rows (decoding) with a packed weight, which streams through once: launches and the choice of tiles.

What a weight's scheme says of activations is left out: few rows cost nothing as they are, so x is not rounded to 8 bits
and the result is nearer to that of the plain weight than the reference's; one row by int4 is to 16 (`int4_gemv`). The
rule that chooses tiles is fitted to what those of 8B took on an H200 (`benchmarks.packed_products --tiles`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from strata.kernels.device_limits import LEAST_CAPABILITY, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.linear.packed.few_rows_kernels import packed_dot_kernel, packed_gemv_kernel
from strata.kernels.linear.packed.in_8_bits import takes_rounded
from strata.kernels.linear.packed.int4_gemv import CHUNK, in_chunks, int4_gemv_kernel
from strata.kernels.linear.skinny import Launch, scratch_bytes
from strata.kernels.linear.skinny_tiles import MOST_ROWS, SkinnyTile
from strata.kernels.op import ATEN
from strata.kernels.quant.dequantize import E4M3_CAPABILITY
from strata.kernels.quant.packed import TWO_OF_FOUR, PackedWeight
from strata.kernels.split_counters import split_counters
from strata.kernels.triton_import import HAS_TRITON

IMPLEMENTATION = "packed, skinny"
# Where a scheme rounds activations, more rows are multiplied in 8 bits: of 64 a layer of 8B took 73 us and 9 for the
# rounding, as floats 104; of 32, whose rows are padded no less, as floats 113.
MOST_ROUNDED_ROWS = 16
_SPLITS = (1, 2, 4, 8, 16)
# Warps that a processor should have, to have enough loads under way; of values in half a byte, which take more
# instructions, more, and twice as many if each has more columns than these.
_WARPS_EACH, _HALVES_WARPS_EACH, _LONG_PART = 3.5, 5.5, 2048
# The widest row that a program of `packed_gemv_kernel` holds at once; two rows of x took it twice as long as one.
GEMV_WIDTH = 16384
# Larger weights are slower if they are launched early: their loads take the room of the kernel ahead. Smaller ones of
# groups load two at a time.
_SMALL_BYTES, _PREFETCH = 26 << 20, 512
# Sums of a thread that the last program of a tile may load at once, and turns of the loop over k that a split leaves.
_MOST_SUMS, _LEAST_TURNS = 128, 4
# A prefetch brings in pieces of so many bytes.
_PIECE = 256
# Programs of one row for each processor: above the second (gate and up of 8B) by int4 twice the columns each were 1 %
# faster in a chain of layers; by e4m3 between both (qkv and o) twice the columns brought T2 from 2.52 to 2.47 ms.
_FEW_PROGRAMS, _MANY_PROGRAMS = 3, 8


@dataclass(frozen=True)
class PackedProduct:
    """A product and what else happens to it in the same kernel: as `SkinnyProduct`, with a packed weight."""

    x: Tensor
    weight: PackedWeight
    bias: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None
    norm_weight: Tensor | None = None

    @property
    def out(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (1 + self.gated)


def ordered(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [..., width] as the columns of the values are ordered."""
    return x if weight.order is None else x.index_select(-1, weight.order)


def launch(product: PackedProduct, tile: SkinnyTile) -> Launch:
    """What multiplies with a tile that `fits`. results: those of `skinny.launch`."""
    x, weight, squares, residual = product.x, product.weight, product.squares, product.residual
    (count, width), out = x.shape, product.out
    tiles = ceil_div(weight.shape[0], tile.columns)
    results = [torch.empty((count, out), dtype=x.dtype, device=x.device)]
    if residual is not None:
        results.append(torch.empty((count, out), dtype=x.dtype, device=x.device))
        results.append(torch.empty((count, tiles), dtype=torch.float32, device=x.device))
    outputs = (*results, *(None,) * (3 - len(results)))
    # Of 2:4 four values are loaded together, those of eight columns.
    values = weight.values.view(torch.int64) if weight.kind == TWO_OF_FOUR else weight.values
    tensors = (product.bias, squares, residual, product.norm_weight, *outputs)
    sizes = (
        count,
        out,
        width // tile.splits,
        x.stride(0),
        values.stride(0),
        weight.scales.stride(0),
        None if residual is None else residual.stride(0),
        None if squares is None else squares.shape[1],
        None if squares is None else product.eps,
    )
    options: dict[str, Any] = {
        "KIND": weight.kind,
        "ROW_GROUP": weight.rows,
        "GATED": product.gated,
        "EARLY": tile.early,
        "BLOCKS": 1 if squares is None else next_power_of_2(squares.shape[1]),
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
        "num_warps": tile.warps,
        "launch_pdl": tile.early,
    }
    rows, group = tile.program_rows(count), _group(weight)
    if tile.kernel == "gemv" and weight.kind == "int4":
        if count != 1 or width > tile.width or not in_chunks(width, group):
            what = f"one row of int4 at once, of chunks of {CHUNK} columns and groups of whole chunks"
            raise ValueError(f"{tile} takes {what}, not {[count, width]} in groups of {group}")
        del options["KIND"]
        count, out, part, _, *strides = sizes
        args = (x, values, weight.scales, weight.zeros, weight.row_scales, *tensors, count, out, part, *strides)
        return Launch(int4_gemv_kernel, (tiles,), args, options | {"GROUP": group}, tuple(results))
    if tile.kernel == "gemv":
        options |= {"ROWS": rows, "ONCE": width <= tile.width}
        args = (x, values, weight.scales, weight.row_scales, *tensors, *sizes)
        return Launch(packed_gemv_kernel, (tiles,), args, options, tuple(results))
    grid = (tiles, tile.splits, ceil_div(count, rows))
    parts = counters = None
    if tile.splits > 1:
        parts = torch.empty((math.prod(grid), tile.columns, rows), dtype=torch.float32, device=x.device)
        counters = split_counters(x.device)
    each = min(tile.prefetch, width // tile.splits) * weight.values.shape[1] // width if values is weight.values else 0
    options |= {"BLOCK_M": rows, "FULL": count % rows == 0, "STAGES": tile.stages, "SPLITS": tile.splits}
    # Of four-bit floats a block may have several groups; of others it has a part of one.
    block = tile.width if weight.kind == "e2m1" or not group else min(tile.width, group)
    options |= {"BLOCK_K": block, "STEPS": tile.width // block}
    options |= {"GROUP": group, "PIECES": 1 << (each // _PIECE).bit_length() - 1 if each >= _PIECE else 0}
    every = (x, values, weight.scales, weight.zeros, weight.row_scales, *tensors, parts, counters, *sizes)
    return Launch(packed_dot_kernel, grid, every, options, tuple(results))


def multiply(product: PackedProduct, tile: SkinnyTile) -> tuple[Tensor, ...]:
    """The results of `launch`, x in the order of the weight. Sums are float32; with the same tile, the bits of a row do
    not depend on other rows."""
    return launch(replace(product, x=ordered(product.x, product.weight)), tile).run()


def chosen_tile(x: Tensor, weight: PackedWeight) -> SkinnyTile | None:
    """The tile for x [..., width] and a packed weight [out, width]; None where the kernels cannot take them."""
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= MOST_ROWS or not readable(x, weight):
        return None
    return packed_tile(rows, out, width, weight.kind, _group(weight), DeviceLimits.of(x.device))


def _group(weight: PackedWeight) -> int:
    """Columns that share a scale, 0: all, or none do."""
    return weight.columns if weight.columns < weight.shape[1] and weight.kind != TWO_OF_FOUR else 0


def readable(x: Tensor, weight: PackedWeight) -> bool:
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
def packed_tile(rows: int, out: int, width: int, kind: str, group: int, device: DeviceLimits) -> SkinnyTile | None:
    """By the rule; None where columns that share a scale fit no block."""
    if device.capability < LEAST_CAPABILITY:
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


def _byte_tile(out: int, width: int, device: DeviceLimits) -> SkinnyTile:
    """A thread has 128 bytes of the weight under way, or 256 where that leaves few programs, but enough."""
    block = max(2048, next_power_of_2(width))
    columns = 4 if block <= 8192 else 2
    if 4096 <= block <= 8192 and _FEW_PROGRAMS <= ceil_div(out, 2 * columns) / device.processors <= _MANY_PROGRAMS:
        columns *= 2
    return SkinnyTile("gemv", columns, block, min(8, block // 1024))


def _int4_tile(out: int, width: int, device: DeviceLimits) -> SkinnyTile:
    """A thread has 256 bytes of the weight under way: a chunk, or two or four, of as many rows as makes that."""
    block = max(1024, next_power_of_2(width))
    if block > 8192:
        return SkinnyTile("gemv", 4, block, 4)
    if out >= 16 * _MANY_PROGRAMS * device.processors:
        return SkinnyTile("gemv", 16, block, block // 1024)
    return SkinnyTile("gemv", 8, block, max(1, block // 2048))


def _nbytes(out: int, width: int, kind: str) -> int:
    return out * width // (2 if kind in ("int4", "e2m1") else 1)


def _fills(tile: SkinnyTile, rows: int, out: int, width: int, a_byte: bool, device: DeviceLimits) -> bool:
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
) -> list[SkinnyTile]:
    """Those of a shape of `dot_shapes` for a weight [out, width]: few splits first; none where no block fits."""
    columns, warps, stages, most = shape
    block = _block_of(rows, out, width, kind, group)
    sums = columns * min(most, next_power_of_2(rows)) // (32 * warps)
    tiles = [SkinnyTile("dot", columns, block or 1, warps, stages, splits, rows=most) for splits in _SPLITS]
    return [
        tile
        for tile in tiles
        if block
        and tile.fits(rows, out, width)
        and (tile.splits == 1 or (width // tile.splits >= _LEAST_TURNS * block and tile.splits * sums <= _MOST_SUMS))
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


def kernels_of(tile: SkinnyTile | None, weight: PackedWeight) -> tuple[Any, ...]:
    """What multiplies with the tile that was found."""
    assert tile is not None
    kernel = packed_dot_kernel
    if tile.kernel == "gemv":
        kernel = int4_gemv_kernel if weight.kind == "int4" else packed_gemv_kernel
    return (kernel,) if weight.order is None else (ATEN, kernel)


def fits_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    """Up to so many rows that arithmetic in 8 bits, where scheme and device have it, would not be faster."""
    rounded = takes_rounded(weight, x.dtype, DeviceLimits.of(x.device))
    most = MOST_ROUNDED_ROWS if rounded else MOST_ROWS
    return x.numel() <= most * weight.shape[1] and chosen_tile(x, weight) is not None


def few_rows_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """`linear`, or `linear_silu_mul` if gated, by the chosen tile."""
    tile = chosen_tile(x, weight)
    assert tile is not None
    (result,) = multiply(PackedProduct(x.reshape(-1, x.shape[-1]), weight, bias, gated=gated), tile)
    return result.view(*x.shape[:-1], result.shape[-1])


def scratch(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    """Bytes beside its result: rows in the order of the weight, and what splits wait in."""
    count, copy = x.numel() // weight.shape[1], 0 if weight.order is None else x.nbytes
    return copy + scratch_bytes(chosen_tile(x, weight), count, weight.shape[0])


def linear_kernels(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
    return kernels_of(chosen_tile(x, weight), weight)
