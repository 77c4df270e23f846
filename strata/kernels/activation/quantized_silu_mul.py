"""SwiGLU's activation whose rows are rounded to 8 bits where they are made, for the product that brings them down."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import silu_in_float32, silu_mul
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.quant.round_rows import (
    can_round,
    empty_quantized,
    round_rows,
    rounding_constants,
    rounding_tile,
    store_quantized,
)
from strata.kernels.triton_import import HAS_TRITON, jit, tl


@fused(rowwise=True)
def silu_mul_round(run: Run, gate: Tensor, up: Tensor, *rounding: Any) -> tuple[Tensor, Tensor]:
    """`round_rows` of `silu_mul`: gate and up [rows, width] of one dtype, kind, columns -> values and scales.

    The product is rounded to the dtype before it is rounded to 8 bits, so results have the bits of the two operations.
    """
    values, scales = run(round_rows, run(silu_mul, gate, up), *rounding)
    return values, scales


@partial(jit, unspecialized=("rows",))
def quantized_silu_mul_kernel(
    gate,
    up,
    values,
    scales,
    rows,
    gate_stride,
    up_stride,
    width,
    groups,
    static,
    KIND: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs [rows / ROWS, tiles of columns]."""
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    row = (first_row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    held = (row < rows) & (column < width)
    opening = tl.load(gate + row * gate_stride + column, mask=held, other=0.0)
    value = tl.load(up + row * up_stride + column, mask=held, other=0.0)
    wide = (silu_in_float32(opening) * value.to(tl.float32)).to(opening.dtype).to(tl.float32)
    store_quantized(
        wide, first_row, first_column, values, scales, rows, width, groups, static, KIND, MOST, LEAST, GROUP
    )


def _triton(gate: Tensor, up: Tensor, kind: str, columns: int, static: float | None = None) -> tuple[Tensor, Tensor]:
    rows, width = gate.shape
    values, scales = empty_quantized(gate.shape, kind, columns, gate.device)
    tile, warps = rounding_tile(width, columns)
    if rows:
        sizes = (rows, gate.stride(0), up.stride(0), width, scales.shape[1])
        known = rounding_constants(kind, columns) | tile
        grid = (ceil_div(rows, tile["ROWS"]), ceil_div(width, tile["COLUMNS"]))
        quantized_silu_mul_kernel[grid](gate, up, values, scales, *sizes, static, **known, num_warps=warps)
    return values, scales


def _fits(gate: Tensor, up: Tensor, kind: str, columns: int, static: float | None = None) -> bool:
    """A tile holds a whole row, or groups."""
    alike = gate.dim() == 2 and gate.shape == up.shape and gate.dtype == up.dtype and up.stride(-1) == 1
    whole = columns > 0 or gate.shape[-1] <= rounding_tile(gate.shape[-1], columns)[0]["COLUMNS"]
    return alike and gate.dtype != torch.float64 and whole and can_round(gate, kind, columns)


def _gated_bytes(gate: Tensor, up: Tensor, *rounding: Any) -> int:
    return gate.numel() * gate.element_size()


silu_mul_round.in_triton(_triton, invariant=True, supports=_fits, kernels=(quantized_silu_mul_kernel,))
if HAS_TRITON:  # of rows that are too long for a program
    silu_mul_round.unfused("silu_mul, round_rows", "cuda", invariant=True, scratch=_gated_bytes)
