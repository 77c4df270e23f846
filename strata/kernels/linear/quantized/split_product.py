"""Products in 8 bits, activations and weights, of some hundred rows: parts of k have programs of their own.

A tile of the result for each processor is not to be had of few rows, and one that goes over the whole width alone
takes as long as its loads take one after the other. The parts' sums meet in the program that ends last, which adds
them up in their order. Of more than 128 rows what programs load from the L2 cache counts, less of it the larger a tile
is, and tiles between powers of two, which products consist of pieces for, give all processors the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.split_counters import split_counters
from strata.kernels.triton_import import TensorDescriptor, jit, tl


@dataclass(frozen=True)
class SplitTile:
    """What a program computes: rows and columns of the result over a part of the width, so much of it at a time.

    Rows or columns, not both, may be the sum of a few powers of two: 192, 224.
    """

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int = 4
    width: int = 128

    def fits(self, width: int) -> bool:
        return width % (self.splits * self.width) == 0


def pieces(size: int) -> tuple[int, ...]:
    """The powers of two that a tile's rows or columns consist of, the largest first."""
    return tuple(1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1)


# Weights with more rows have tiles enough that are wide.
_NARROW_OUT, _MIN_PART = 8192, 4096
# Of these by the most rows (`benchmarks.split_products` times them and all others).
_OF_WIDE = (
    (64, SplitTile(64, 128, 1, 4)),
    (128, SplitTile(128, 256, 1, 8)),
    (192, SplitTile(192, 256, 1, 8)),
    (256, SplitTile(128, 256, 1, 8)),
)


def split_tile(rows: int, out: int, width: int, processors: int) -> SplitTile | None:
    """The tile for so many rows by a weight [out, width], fitted to products of 8B on an H200; None: no tile fits."""
    if width % 128:
        return None
    if out > _NARROW_OUT:
        return next((tile for most, tile in _OF_WIDE if rows <= most), None)
    held = 64 if rows <= 64 else 192 if 128 < rows <= 192 else 128
    tiles = ceil_div(out, 64) * ceil_div(rows, held)
    # Six stages take most of a processor's memory.
    tile = SplitTile(held, 64, 1, 4, stages=6 if tiles <= processors else 4)
    divided = replace(tile, splits=2)
    pays = 2 * tiles <= processors and (held == 192 or width >= 2 * _MIN_PART) and divided.fits(width)
    return divided if pays else tile


@partial(jit, unspecialized=("rows",))
def split_product_kernel(
    x,
    x_rest,
    values,
    values_rest,
    values_last,
    x_scales,
    scales,
    row_scales,
    bias,
    result,
    parts,
    counters,
    rows,
    out,
    part,
    scale_stride,
    ROW_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST_N: tl.constexpr,
    LAST_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Programs [tiles of rows, tiles of columns, SPLITS]; part: columns of k of each.

    x [rows, width], values [out, width]: descriptors of int8 or e4m3. x_scales [rows] float32, scales [out /
    ROW_GROUP]. A tile is [BLOCK_M + REST_M, BLOCK_N + REST_N + LAST_N], each piece with descriptors of its own, or 0
    and None; pieces of a tile share what they load of the other operand.
    """
    kind: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    # Tiles of rows run side by side, so that a weight comes from memory once.
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, column = row_tile * (BLOCK_M + REST_M), tile * (BLOCK_N + REST_N + LAST_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
    if REST_M > 0:
        rest = tl.zeros((REST_M, BLOCK_N), dtype=kind)
    if REST_N > 0:
        rest = tl.zeros((BLOCK_M, REST_N), dtype=kind)
    if LAST_N > 0:
        last_sums = tl.zeros((BLOCK_M, LAST_N), dtype=kind)
    for k in range(split * part, (split + 1) * part, BLOCK_K):
        left, right = x.load([row, k]), values.load([column, k]).T
        total = tl.dot(left, right, total, out_dtype=kind)
        if REST_M > 0:
            rest = tl.dot(x_rest.load([row + BLOCK_M, k]), right, rest, out_dtype=kind)
        if REST_N > 0:
            rest = tl.dot(left, values_rest.load([column + BLOCK_N, k]).T, rest, out_dtype=kind)
        if LAST_N > 0:
            last_sums = tl.dot(left, values_last.load([column + BLOCK_N + REST_N, k]).T, last_sums, out_dtype=kind)
    # Where a piece's sums begin among those of a tile.
    REST: tl.constexpr = BLOCK_M * BLOCK_N
    LAST: tl.constexpr = BLOCK_M * (BLOCK_N + REST_N)
    SIZE: tl.constexpr = LAST + BLOCK_M * LAST_N + REST_M * BLOCK_N
    last = True
    first = parts
    if SPLITS > 1:
        offset = row_tile * tl.num_programs(1) + tile
        first = parts + offset.to(tl.int64) * (SPLITS * SIZE)
        own = first + split * SIZE
        tl.store(own + _elements(BLOCK_M, BLOCK_N), total)
        if REST_M + REST_N > 0:
            tl.store(own + REST + _elements(rest.shape[0], rest.shape[1]), rest)
        if LAST_N > 0:
            tl.store(own + LAST + _elements(BLOCK_M, LAST_N), last_sums)
        tl.debug_barrier()  # all of a program's sums are there before it arrives
        last = tl.atomic_add(counters + offset, 1, sem="acq_rel") == SPLITS - 1
    if last:
        ends = (x_scales, scales, row_scales, bias, result, rows, out, scale_stride)
        if SPLITS > 1:
            total = _add_parts(first, BLOCK_M, BLOCK_N, SIZE, SPLITS)
        _store_sums(total, row, column, ends, ROW_GROUP)
        if REST_M + REST_N > 0:
            if SPLITS > 1:
                rest = _add_parts(first + REST, rest.shape[0], rest.shape[1], SIZE, SPLITS)
            _store_sums(
                rest,
                row + BLOCK_M if REST_M > 0 else row,
                column + BLOCK_N if REST_N > 0 else column,
                ends,
                ROW_GROUP,
            )
        if LAST_N > 0:
            if SPLITS > 1:
                last_sums = _add_parts(first + LAST, BLOCK_M, LAST_N, SIZE, SPLITS)
            _store_sums(last_sums, row, column + BLOCK_N + REST_N, ends, ROW_GROUP)
        if SPLITS > 1:
            tl.store(counters + offset, 0)


@jit
def _elements(M: tl.constexpr, N: tl.constexpr):
    return tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]


@jit
def _add_parts(first, M: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    # Past the nearest cache, which knows nothing of other programs' writes.
    place = first + _elements(M, N)
    total = tl.load(place, cache_modifier=".cg")
    for other in tl.static_range(1, SPLITS):
        total += tl.load(place + other * SIZE, cache_modifier=".cg")
    return total


@jit
def _store_sums(total, first_row, first_column, ends, ROW_GROUP: tl.constexpr):
    """The result of a piece of a tile from its sums."""
    x_scales, scales, row_scales, bias, result, rows, out, scale_stride = ends
    row = first_row + tl.arange(0, total.shape[0])
    column = first_column + tl.arange(0, total.shape[1])
    own = tl.minimum(column, out - 1)
    scale = wide_scale(tl.load(scales + (own // ROW_GROUP if ROW_GROUP > 0 else own * 0) * scale_stride))
    if row_scales is not None:
        scale *= tl.load(row_scales + own)
    wide = total.to(tl.float32) * tl.load(x_scales + tl.minimum(row, rows - 1))[:, None] * scale[None, :]
    if bias is not None:
        wide += tl.load(bias + own).to(tl.float32)[None, :]
    held = (row < rows)[:, None] & (column < out)[None, :]
    place = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(place, wide.to(result.dtype.element_ty), mask=held)


def sums_bytes(tile: SplitTile, rows: int, out: int) -> int:
    """What the parts' sums take until they are added up."""
    tiles = ceil_div(out, tile.columns) * ceil_div(rows, tile.rows)
    return 4 * tiles * tile.splits * tile.rows * tile.columns if tile.splits > 1 else 0


def split_product(
    values: Tensor, x_scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, tile: SplitTile
) -> Tensor:
    """Rounded rows [rows, width] with scales [rows, 1] times a weight with scales of rows -> [rows, out] in `dtype`.

    Sums of e4m3 are those of the tensor cores within a part, in float32 over the parts.
    """
    (rows, width), out = values.shape, weight.shape[0]
    result = torch.empty((rows, out), dtype=dtype, device=values.device)
    grid = (ceil_div(rows, tile.rows), ceil_div(out, tile.columns), tile.splits)
    parts = counters = None
    if tile.splits > 1:
        sums = torch.int32 if values.dtype == torch.int8 else torch.float32
        parts = torch.empty((grid[0] * grid[1], tile.splits, tile.rows, tile.columns), dtype=sums, device=values.device)
        counters = split_counters(values.device)
    of_rows, of_columns = _pieces_of(tile)
    split_product_kernel[grid](
        *(_descriptor(values, size, tile.width) for size in of_rows[:2]),
        *(_descriptor(weight.values, size, tile.width) for size in of_columns),
        x_scales,
        weight.scales,
        weight.row_scales,
        bias,
        result,
        parts,
        counters,
        rows,
        out,
        width // tile.splits,
        weight.scales.stride(0),
        ROW_GROUP=weight.rows,
        **_constants(tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


def _pieces_of(tile: SplitTile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a tile's rows and columns, 0 where it has fewer."""
    # The last program's sums of 256 rows at once do not fit its registers.
    of_rows = (128, 128) if tile.rows == 256 and tile.splits > 1 and tile.columns == 128 else pieces(tile.rows)
    of_columns = pieces(tile.columns)
    if len(of_rows) > 2 or len(of_columns) > 3 or min(len(of_rows), len(of_columns)) > 1:
        raise ValueError(
            f"a tile of {tile.rows} rows and {tile.columns} columns: either rows may be the sum of two powers of two "
            "or columns of up to three, the other is one"
        )
    return (*of_rows, 0)[:2], (*of_columns, 0, 0)[:3]


def _constants(tile: SplitTile) -> dict[str, int]:
    of_rows, of_columns = _pieces_of(tile)
    sizes = dict(zip(("BLOCK_M", "REST_M", "BLOCK_N", "REST_N", "LAST_N"), (*of_rows, *of_columns), strict=True))
    return sizes | {"BLOCK_K": tile.width, "SPLITS": tile.splits}


def _descriptor(values: Tensor, size: int, width: int) -> TensorDescriptor | None:
    return TensorDescriptor.from_tensor(values, [size, width]) if size else None
