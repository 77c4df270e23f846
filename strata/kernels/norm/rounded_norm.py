"""RMS norms whose rows are rounded to 8 bits where they are made, for products by weights in 8 bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.norm.norm import add_rms_norm, inverse_rms, rms_norm, row_tile, scaled
from strata.kernels.norm.wide_norm import wide_rms_norm
from strata.kernels.quant.round_rows import (
    MOST_COLUMNS,
    can_round,
    empty_rounded,
    round_rows,
    rounding_case,
    rounding_cases,
    rounding_constants,
    store_rounded,
)
from strata.kernels.triton_import import HAS_TRITON, jit, tl

Rounded = tuple[Tensor, ...]


@fused(rowwise=True)
def rms_norm_round(
    run: Run, x: Tensor, weight: Tensor, eps: float, kind: str, columns: int, keeps: bool, static: float | None = None
) -> Rounded:
    """`rms_norm` of x [rows, width] and `round_rows` of that -> values, scales and, if it keeps them, the rows.

    The norm is rounded to x.dtype before it is rounded to 8 bits, so results have the bits of the two operations.
    """
    normed = run(rms_norm, x, weight, eps)
    values, scales = run(round_rows, normed, kind, columns, static)
    return (values, scales, normed) if keeps else (values, scales)


@fused(rowwise=True)
def add_rms_norm_round(
    run: Run,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> Rounded:
    """`x + residual`, and of that sum what `rms_norm_round` returns: x, residual [rows, width] of one dtype."""
    total, normed = run(add_rms_norm, x, residual, weight, eps)
    values, scales = run(round_rows, normed, kind, columns, static)
    return (total, values, scales, normed) if keeps else (total, values, scales)


@fused(rowwise=True)
def wide_rms_norm_round(
    run: Run,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> Rounded:
    """Of `wide_rms_norm` what `rms_norm_round` returns: x [rows, width]."""
    normed = run(wide_rms_norm, x, weight, eps, offset)
    values, scales = run(round_rows, normed, kind, columns, static)
    return (values, scales, normed) if keeps else (values, scales)


@partial(jit, unspecialized=("rows",))
def rounded_norm_kernel(
    x,
    residual,
    weight,
    total,
    result,
    values,
    scales,
    rows,
    x_stride,
    residual_stride,
    width,
    groups,
    static,
    eps,
    offset,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `rms_norm_kernel`, with a residual `add_rms_norm_kernel`, if WIDE `wide_rms_norm_kernel`, which alone has an
    offset; result: None if nobody reads it."""
    first_row = tl.program_id(0) * ROWS
    row = (first_row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    given = tl.load(x + row * x_stride + column, mask=held, other=0.0)
    if residual is not None:
        other = tl.load(residual + row * residual_stride + column, mask=held, other=0.0)
        given = (given.to(tl.float32) + other.to(tl.float32)).to(given.dtype)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    scale = inverse_rms(given, width, eps)
    if WIDE:
        normed = (given.to(tl.float32) * scale * (factor.to(tl.float32) + offset)).to(given.dtype)
    else:
        normed = scaled(given, scale, factor)
    if total is not None:
        tl.store(total + row * width + column, given, mask=held)
    if result is not None:
        tl.store(result + row * width + column, normed, mask=held)
    wide = normed.to(tl.float32)
    store_rounded(wide, first_row, 0, values, scales, rows, width, groups, static, KIND, MOST, LEAST, GROUP)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
    offset: float | None = None,
) -> Rounded:
    """The tiles of `rms_norm`, so that each row is summed in the same order. offset: of `wide_rms_norm`."""
    rows, width = x.shape
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keeps else None
    values, scales = empty_rounded(x.shape, kind, columns, x.device)
    if rows:
        tile, warps = row_tile(width)
        rounded_norm_kernel[(ceil_div(rows, tile["ROWS"]),)](
            x,
            residual,
            weight,
            total,
            result,
            values,
            scales,
            rows,
            x.stride(0),
            None if residual is None else residual.stride(0),
            width,
            scales.shape[1],
            static,
            eps,
            offset,
            WIDE=offset is not None,
            **rounding_constants(kind, columns),
            **tile,
            num_warps=warps,
        )
    return tuple(one for one in (total, values, scales, result) if one is not None)


def _triton(
    x: Tensor, weight: Tensor, eps: float, kind: str, columns: int, keeps: bool, static: float | None = None
) -> Rounded:
    return _launch(x, None, weight, eps, kind, columns, keeps, static)


def _sum_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> Rounded:
    return _launch(x, residual, weight, eps, kind, columns, keeps, static)


def _wide_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> Rounded:
    return _launch(x, None, weight, eps, kind, columns, keeps, static, offset)


def _fits(
    x: Tensor, weight: Tensor, eps: float, kind: str, columns: int, keeps: bool, static: float | None = None
) -> bool:
    """A tile holds a whole row, and whole groups of it."""
    whole = columns <= row_tile(x.shape[-1])[0]["WIDTH"] and x.shape[-1] <= MOST_COLUMNS
    return x.dim() == 2 and x.dtype != torch.float64 and whole and can_round(x, kind, columns)


def _sum_fits(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> bool:
    alike = x.shape == residual.shape and x.dtype == residual.dtype and residual.stride(-1) == 1
    return alike and _fits(x, weight, eps, kind, columns, keeps)


def _wide_fits(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    kind: str,
    columns: int,
    keeps: bool,
    static: float | None = None,
) -> bool:
    return _fits(x, weight, eps, kind, columns, keeps)


if HAS_TRITON:
    _KERNELS = (rounded_norm_kernel,)
    rms_norm_round.implement("triton", "cuda", invariant=True, supports=_fits, kernels=_KERNELS)(_triton)
    add_rms_norm_round.implement("triton", "cuda", invariant=True, supports=_sum_fits, kernels=_KERNELS)(_sum_triton)
    wide_rms_norm_round.implement("triton", "cuda", invariant=True, supports=_wide_fits, kernels=_KERNELS)(_wide_triton)


def compile_cases() -> list[CompileCase]:
    pointers = dict.fromkeys(("x", "residual", "weight", "total", "result"), "*bf16:16")
    strides = dict.fromkeys(("x_stride", "residual_stride", "width"), "i32:16")
    given = pointers | strides | {"scales": "*fp32:16", "rows": "i32", "groups": "i32", "eps": "fp32"}
    cases = []
    for width in (4096, 16384):
        for case in rounding_cases():
            tile, warps = row_tile(width)
            signature, constants, title = rounding_case(case, given, tile | {"WIDE": False, "offset": None})
            title = f"add_rms_norm of {width} {title}"
            cases.append(CompileCase(title, rounded_norm_kernel, signature, constants, warps, 2))
    # Without a residual, and of which only the rounded rows are read.
    first = cases[0]
    absent = ("residual", "residual_stride", "total", "result")
    plain = {name: kind for name, kind in first.signature.items() if name not in absent}
    constants = dict(first.constants) | dict.fromkeys(absent)
    cases.append(CompileCase("rms_norm of 4096 to int8", first.kernel, plain, constants, first.num_warps, 2))
    del constants["offset"]
    plain, constants = plain | {"offset": "fp32"}, constants | {"WIDE": True}
    cases.append(CompileCase("wide_rms_norm of 4096 to int8", first.kernel, plain, constants, first.num_warps, 2))
    return cases
