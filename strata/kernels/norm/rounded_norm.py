"""RMS norms whose rows are rounded to 8 bits where they are made, for products by weights in 8 bits.

Each takes the arguments of a norm and behind them those of the rounding: kind and columns as `round_rows` takes them,
keeps (whether the rows are returned as they are, too) and, maybe, the static scale. The norm is rounded to x.dtype
before it is rounded to 8 bits, so results have the bits of the two operations one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.fused import Run, fused
from strata.kernels.norm.norm import (
    add_rms_norm,
    alike,
    launch_norm,
    rms_norm,
    rms_norm_kernel,
    row_tile,
    wide_rms_norm,
)
from strata.kernels.quant.round_rows import MOST_COLUMNS, can_round, round_rows

Rounded = tuple[Tensor, ...]


@fused(rowwise=True)
def rms_norm_round(run: Run, x: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    """`rms_norm` of x [rows, width] and `round_rows` of that -> values, scales and, if it keeps them, the rows."""
    return _rounded(run, run(rms_norm, x, weight, eps), *rounding)


@fused(rowwise=True)
def add_rms_norm_round(run: Run, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    """`x + residual`, and of that sum what `rms_norm_round` returns: x, residual [rows, width] of one dtype."""
    total, normed = run(add_rms_norm, x, residual, weight, eps)
    return total, *_rounded(run, normed, *rounding)


@fused(rowwise=True)
def wide_rms_norm_round(run: Run, x: Tensor, weight: Tensor, eps: float, offset: float, *rounding: Any) -> Rounded:
    """Of `wide_rms_norm` what `rms_norm_round` returns: x [rows, width]."""
    return _rounded(run, run(wide_rms_norm, x, weight, eps, offset), *rounding)


def _rounded(run: Run, normed: Tensor, kind: str, columns: int, keeps: bool, static: float | None = None) -> Rounded:
    values, scales = run(round_rows, normed, kind, columns, static)
    return (values, scales, normed) if keeps else (values, scales)


def _given(kind: str, columns: int, keeps: bool, static: float | None = None) -> dict[str, Any]:
    return {"rounding": (kind, columns, static), "keeps": keeps}


def _triton(x: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, **_given(*rounding))


def _sum_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, residual, **_given(*rounding))


def _wide_triton(x: Tensor, weight: Tensor, eps: float, offset: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, offset=offset, **_given(*rounding))


def _fits(x: Tensor, weight: Tensor, eps: float, kind: str, columns: int, *_: Any) -> bool:
    """A tile holds a whole row, and whole groups of it."""
    whole = columns <= row_tile(x.shape[-1])[0]["WIDTH"] and x.shape[-1] <= MOST_COLUMNS
    return x.dim() == 2 and x.dtype != torch.float64 and whole and can_round(x, kind, columns)


def _sum_fits(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rounding: Any) -> bool:
    return alike(x, residual) and _fits(x, weight, eps, *rounding)


def _wide_fits(x: Tensor, weight: Tensor, eps: float, offset: float, *rounding: Any) -> bool:
    return _fits(x, weight, eps, *rounding)


for _operation, _run, _supports in (
    (rms_norm_round, _triton, _fits),
    (add_rms_norm_round, _sum_triton, _sum_fits),
    (wide_rms_norm_round, _wide_triton, _wide_fits),
):
    _operation.in_triton(_run, invariant=True, supports=_supports, kernels=(rms_norm_kernel,))
