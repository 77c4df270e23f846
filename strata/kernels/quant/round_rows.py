"""Rows of activations in 8 bits, for products with weights in 8 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.quant.quantized import LARGEST, MIN_SCALE, Scheme, pack_values, scales_of_rows, spread, to_nearest
from strata.kernels.triton_import import jit, tl

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def _cost(x: Tensor, kind: str, columns: int, static: float | None = None, *, workload: Workload) -> Cost:
    groups = x.shape[0] * (-(-x.shape[1] // columns) if columns else 1)
    # The largest magnitude, a multiplication, and the rounding.
    return Cost(3 * x.numel(), x.nbytes, x.numel() + 4 * groups)


def _meta(x: Tensor, kind: str, columns: int, static: float | None = None) -> tuple[Tensor, Tensor]:
    return empty_quantized(x.shape, kind, columns, torch.device("meta"))


@operation(_cost, meta=_meta, rowwise=True)
def round_rows(x: Tensor, kind: str, columns: int, static: float | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, width] in 8 bits -> values [rows, width], float8_e4m3fn ("e4m3") or int8 ("int8"), and their scales.

    scales: float32 [rows, groups]. So many columns share one, the last of a row maybe fewer; 0: all of a row.

    The largest magnitude that a scale serves becomes the largest value. Rows are multiplied by the inverse of their
    scale, rounded, since a division for each element would take longer than memory does. static: instead the scale of
    all rows (columns 0); what is beyond the largest value becomes it.
    """
    groups = Scheme(kind, 1, columns)
    scales = scales_of_rows(x.float(), groups, static)
    return pack_values(to_nearest(x.float() * spread(1 / scales, groups, x.shape), kind), kind), scales


def empty_quantized(shape: torch.Size, kind: str, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the results of `round_rows` of rows of this shape."""
    groups = -(-shape[1] // columns) if columns else 1
    values = torch.empty(shape, dtype=DTYPES[kind], device=device)
    return values, torch.empty((shape[0], groups), dtype=torch.float32, device=device)


@jit
def scale_of(largest, poison, static, MOST: tl.constexpr, LEAST: tl.constexpr):
    """poison: 0, or NaN where something was no finite number: so a run sees it, for integers have no NaN. static: the
    scale, if it was found ahead."""
    found = tl.maximum(tl.div_rn(largest, MOST), LEAST) if static is None else static
    return found + poison


@jit
def in_8_bits(wide, scale, KIND: tl.constexpr, MOST: tl.constexpr):
    """Float32 by the inverse of its scale, to what converts exactly (integers) or as the hardware rounds."""
    scaled = tl.clamp(wide * tl.div_rn(1.0, scale), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "int8":
        # The sum has no bits below 1: to the nearest, ties to even.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled


@jit
def store_quantized(
    wide,
    first_row,
    first_column,
    values,
    scales,
    rows,
    width,
    groups,
    static,
    KIND: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Round and store a tile [rows, columns] of float32, which is 0 beyond the width, and its scales.

    GROUP 0: it has whole rows; else its columns are a multiple of GROUP. It is stored as one long row: a tile of its
    shape would let each thread of the kernel take 16 columns at a time, and sum a row in another order than in 16 bits.
    static: the scale of all rows, or None.
    """
    ROWS: tl.constexpr = wide.shape[0]
    COLUMNS: tl.constexpr = wide.shape[1]
    SHARED: tl.constexpr = GROUP if GROUP > 0 else COLUMNS
    EACH: tl.constexpr = COLUMNS // SHARED
    grouped = tl.reshape(wide, (ROWS * EACH, SHARED))
    scale = scale_of(tl.max(tl.abs(grouped), 1), tl.sum(grouped * 0.0, 1), static, MOST, LEAST)
    place = tl.arange(0, ROWS * EACH)
    row, group = first_row + place // EACH, first_column // SHARED + place % EACH
    tl.store(scales + row.to(tl.int64) * groups + group, scale, mask=(row < rows) & (group < groups))
    stored = in_8_bits(grouped, scale[:, None], KIND, MOST).to(values.dtype.element_ty)
    element = tl.arange(0, ROWS * COLUMNS)
    its_row, column = first_row + element // COLUMNS, first_column + element % COLUMNS
    held = (its_row < rows) & (column < width)
    tl.store(values + its_row.to(tl.int64) * width + column, tl.reshape(stored, (ROWS * COLUMNS,)), mask=held)


@partial(jit, unspecialized=("rows",))
def round_rows_kernel(
    x,
    values,
    scales,
    rows,
    width,
    x_stride,
    groups,
    static,
    KIND: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Programs [rows / ROWS, tiles of columns]; not ONCE: [rows], of rows too long for a tile, read twice."""
    first_row = tl.program_id(0) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    row = (first_row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        held = (row < rows) & (column < width)
        wide = tl.load(x + row * x_stride + column, mask=held, other=0.0).to(tl.float32)
        store_quantized(
            wide, first_row, first_column, values, scales, rows, width, groups, static, KIND, MOST, LEAST, GROUP
        )
    else:
        top = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        poison = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, width, COLUMNS):
            given = tl.load(x + row * x_stride + start + column, mask=start + column < width, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.abs(given))
            poison += given * 0.0
        scale = scale_of(tl.max(top, 1), tl.sum(poison, 1), static, MOST, LEAST)
        tl.store(scales + first_row + tl.arange(0, ROWS), scale)
        for start in range(0, width, COLUMNS):
            held = start + column < width
            given = tl.load(x + row * x_stride + start + column, mask=held, other=0.0).to(tl.float32)
            stored = in_8_bits(given, scale[:, None], KIND, MOST).to(values.dtype.element_ty)
            tl.store(values + row * width + start + column, stored, mask=held)


# Columns of the longest row that a program holds; of others, and of groups, a tile.
MAX_COLUMNS, _COLUMNS = 16384, 4096


def rounding_tile(width: int, columns: int) -> tuple[dict[str, int], int]:
    """Rows and columns of a tile, and its warps. columns: that share a scale; 0: all, and a row is in one tile."""
    padded = next_power_of_2(width)
    if columns:
        padded = max(columns, min(padded, _COLUMNS))
    padded = padded if padded <= MAX_COLUMNS else _COLUMNS
    return {"ROWS": max(1, 1024 // padded), "COLUMNS": padded}, min(max(padded // 512, 4), 16)


def rounding_constants(kind: str, columns: int) -> dict[str, Any]:
    """What kernels that end in `store_quantized` are compiled for."""
    return {"KIND": kind, "MOST": LARGEST[kind], "LEAST": MIN_SCALE, "GROUP": columns}


def _triton(x: Tensor, kind: str, columns: int, static: float | None = None) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    values, scales = empty_quantized(x.shape, kind, columns, x.device)
    tile, warps = rounding_tile(width, columns)
    once = columns > 0 or width <= tile["COLUMNS"]
    if rows:
        sizes = (rows, width, x.stride(0), scales.shape[1])
        known = rounding_constants(kind, columns) | tile | {"ONCE": once, "num_warps": warps}
        grid = (ceil_div(rows, tile["ROWS"]), ceil_div(width, tile["COLUMNS"]) if once else 1)
        round_rows_kernel[grid](x, values, scales, *sizes, static, **known)
    return values, scales


def can_round(x: Tensor, kind: str, columns: int, static: float | None = None) -> bool:
    """Whether kernels that end in `store_quantized` can round such rows."""
    power_of_2 = columns & (columns - 1) == 0
    return kind in DTYPES and power_of_2 and columns <= _COLUMNS and x.stride(-1) == 1 and x.shape[-1] > 0


round_rows.in_triton(_triton, invariant=True, supports=can_round, kernels=(round_rows_kernel,))
