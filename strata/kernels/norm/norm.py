"""Root-mean-square layer normalization (Zhang and Sennrich 2019), of a tensor or of the sum of two.

`wide_rms_norm`: one whose weights multiply in float32, before the result is rounded: OLMo 2 and 3, Gemma (there as 1 +
w).

`sharded_rms_norm`: of rows that several ranks divide: each squares its own columns, the sum over the ranks scales them.

`..._norm_round`: whose rows are rounded to 8 bits where they are made, for products by weights in 8 bits. Each takes
the arguments of a norm and behind them those of the rounding: kind and columns as `round_rows` takes them, keeps
(whether the rows are returned as they are, too) and, maybe, the static scale. The norm is rounded to x.dtype before it
is rounded to 8 bits, so results have the bits of the two operations one after the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.quant.round_rows import (
    MAX_COLUMNS,
    can_round,
    empty_quantized,
    round_rows,
    rounding_constants,
    store_quantized,
)
from strata.kernels.torch_functions import add
from strata.kernels.triton_import import jit, tl


def _cost(x: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


@operation(_cost, rowwise=True, fusible=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x [..., width], weight [width] of the same dtype -> [..., width]. Computed in float32 (float64 for float64 input)
    and rounded to x.dtype before the multiplication by the weight, which is the order of transformers' LlamaRMSNorm.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


@rms_norm.implement("torch", "cpu", invariant=True)
def _torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # ATen reduces each row alone, in an order that depends on the width only. In 16 bits its fused form would multiply
    # by the weight before it rounds, so the weight is applied apart.
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


def _sum_backward_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    """Of the norm, with the gradient of the sum added; the result is that of both that were added up."""
    found: Cost = rms_norm.backward_cost(x, weight, eps, workload=workload)
    return found + Cost(flops=x.numel(), read=x.nbytes)


@fused(rowwise=True, fusible=True, backward=_sum_backward_cost)
def add_rms_norm(run: Run, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + residual`, and `rms_norm` of that sum.

    x, residual [..., width], weight [width] of one dtype -> two tensors like x. The sum is rounded to x.dtype before it
    is normalized, so the results have the bits of the two operations one after the other.
    """
    total = run(add, x, residual)
    return total, run(rms_norm, total, weight, eps)


@add_rms_norm.implement("torch", "cpu", invariant=True)
def _sum_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _torch(total, weight, eps)


@jit
def inverse_rms(values, width, eps):
    """1 / sqrt(mean of squares + eps) of each row [rows, columns] -> [rows, 1] float32; what lies past `width` is 0."""
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)[:, None]


@jit
def scaled(values, scale, factor):
    """`values` by the scale of their row, rounded to their dtype, by the norm's weights."""
    rounded = (values.to(tl.float32) * scale).to(values.dtype).to(tl.float32)
    return (rounded * factor.to(tl.float32)).to(values.dtype)


@partial(jit, unspecialized=("rows",))
def rms_norm_kernel(
    x,
    received,
    residual,
    weight,
    total,
    result,
    values,
    scales,
    rows,
    heads,
    x_stride,
    head_stride,
    residual_stride,
    width,
    groups,
    static,
    eps,
    offset,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr = None,
    MOST: tl.constexpr = None,
    LEAST: tl.constexpr = None,
    GROUP: tl.constexpr = None,
):
    """Every norm of whole rows: programs [rows / ROWS]. What a call has no use for is None.

    heads: rows of x stand so many to a token, with a stride of their own. residual: added to x; received: before that,
    x being contiguous, which gets the sum. offset: as in `wide_rms_norm`. values, scales: as `round_rows` makes them.
    """
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    if heads is None:
        row = row.to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    if heads is None:
        start = row * (x_stride if received is None else width)
    else:
        start = (row // heads).to(tl.int64) * x_stride + row % heads * head_stride
    given = tl.load(x + start + column, mask=held, other=0.0)
    if received is not None:
        other = tl.load(received + start + column, mask=held, other=0.0)
    if residual is not None:
        carried = tl.load(residual + row * residual_stride + column, mask=held, other=0.0)
        if received is not None:
            given = (given.to(tl.float32) + other.to(tl.float32)).to(given.dtype)
            total = x
        given = (given.to(tl.float32) + carried.to(tl.float32)).to(given.dtype)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    if offset is not None:
        factor = factor.to(tl.float32) + offset
    scale = inverse_rms(given, width, eps)
    if offset is not None:
        normed = (given.to(tl.float32) * scale * factor).to(given.dtype)
    else:
        normed = scaled(given, scale, factor)
    # All at the end: the values keep the threads that loaded them, and every norm sums a row in the same order.
    if total is not None:
        tl.store(total + row.to(tl.int64) * width + column, given, mask=held)
    if result is not None:
        tl.store(result + row.to(tl.int64) * width + column, normed, mask=held)
    if values is not None:
        wide = normed.to(tl.float32)
        store_quantized(wide, first_row, 0, values, scales, rows, width, groups, static, KIND, MOST, LEAST, GROUP)


def launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    received: Tensor | None = None,
    offset: float | None = None,
    rounding: tuple[str, int, float | None] | None = None,
    keeps: bool = True,
) -> tuple[Tensor, ...]:
    """The norm of x [..., width], or of `x + received + residual`, by `rms_norm_kernel`.

    A program takes one row, or several short ones: how many, and its threads, depend on the width only. rounding: kind,
    columns and static scale of `round_rows`. -> the sum, if one is made, in the memory of x if `received` is added;
    values and scales, if rows are rounded; the norm, if the caller keeps it.
    """
    width, plain = x.shape[-1], residual is None and rounding is None
    total = None if residual is None or received is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keeps else None
    values, scales = (None, None) if rounding is None else empty_quantized(x.shape, *rounding[:2], x.device)
    # Two row strides serve the heads of a merged projection.
    rows = x if plain and x.dim() == 3 else x.reshape(-1, width).unsqueeze(1)
    others = None if residual is None else residual.reshape(-1, width)
    if rows.numel():
        tile, warps = row_tile(width)
        rms_norm_kernel[(ceil_div(rows.numel() // width, tile["ROWS"]),)](
            rows,
            received,
            others,
            weight,
            total,
            result,
            values,
            scales,
            rows.numel() // width,
            rows.shape[1] if plain else None,
            rows.stride(0) if received is None else None,
            rows.stride(1) if plain else None,
            None if others is None else others.stride(0),
            width,
            None if scales is None else scales.shape[1],
            None if rounding is None else rounding[2],
            eps,
            offset,
            **tile,
            **({} if rounding is None else rounding_constants(*rounding[:2])),
            num_warps=warps,
        )
    made = (total if received is None else x, values, scales, result)
    return tuple(one for one in made if one is not None)


def row_tile(width: int) -> tuple[dict[str, int], int]:
    """Rows and padded width of a tile, and its warps. Kernels that share it sum a row in the same order."""
    padded: int = next_power_of_2(width)
    return {"ROWS": max(1, 1024 // padded), "WIDTH": padded}, min(max(padded // 512, 4), 16)


def fits(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> bool:
    return x.shape[-1] <= 16384 and x.stride(-1) == 1 and x.dtype != torch.float64


def _sum_fits(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    return alike(x, residual) and fits(x, weight, eps)


def alike(x: Tensor, residual: Tensor) -> bool:
    """Whether a kernel that reads rows of x can add these."""
    return x.shape == residual.shape and x.dtype == residual.dtype and residual.stride(-1) == 1


def _triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, weight, eps)[0]


def _sum_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return launch_norm(x, weight, eps, residual)


rms_norm.in_triton(_triton, invariant=True, supports=fits, kernels=(rms_norm_kernel,))
add_rms_norm.in_triton(_sum_triton, invariant=True, supports=_sum_fits, kernels=(rms_norm_kernel,))


def _wide_cost(x: Tensor, weight: Tensor, eps: float, offset: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


@operation(_wide_cost, rowwise=True)
def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension (Zhang and Sennrich 2019).

    x [..., width], weight [width] of the same dtype -> [..., width]. All of it is computed in float32 (float64 for
    float64 input) and rounded once, as in transformers' Olmo2RMSNorm (offset 0) and Gemma3RMSNorm (offset 1).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


# A row is reduced in an order that depends on its width only.
wide_rms_norm.by_definition("cpu", invariant=True, differentiable=True)


def _wide_triton(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return launch_norm(x, weight, eps, offset=offset)[0]


wide_rms_norm.in_triton(_wide_triton, invariant=True, supports=fits, kernels=(rms_norm_kernel,))
wide_rms_norm.by_definition("cuda", differentiable=True)


# A row of 16 bytes is a word of the kernels that carry messages.
_COPIES = 4


def _square_cost(x: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=2 * x.numel(), read=x.nbytes, written=x.numel() // x.shape[-1] * _COPIES * 4)


def _square_meta(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], _COPIES), dtype=wide, device="meta")


@operation(_square_cost, meta=_square_meta, rowwise=True)
def mean_square(x: Tensor) -> Tensor:
    """The mean of the squares of each row, four times: x [..., width] -> [..., 4] float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1, keepdim=True).expand(*x.shape[:-1], _COPIES)


def _norm_cost(
    x: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float, offset: float, *, workload: Workload
) -> Cost:
    read = x.nbytes + total.nbytes + weight.nbytes
    return Cost(flops=2 * x.numel(), read=read, written=x.nbytes, weights=weight.nbytes)


@operation(_norm_cost, rowwise=True)
def sharded_rms_norm(x: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`wide_rms_norm` of this rank's columns of rows that `ranks` ranks divide evenly.

    x [..., own width]; total [..., 4] float32, the sum over the ranks of `mean_square` of their columns; weight
    [own width], of these columns -> like x. Columns that several ranks hold count once for each, which leaves the mean
    as it is where all are held equally often.
    """
    scale = torch.rsqrt(total[..., :1] / ranks + eps)
    return (x.to(total.dtype) * scale * (weight.to(total.dtype) + offset)).to(x.dtype)


mean_square.by_definition("cpu", invariant=True, differentiable=True)
# On a GPU the order in which torch adds up a row depends on how many there are.
mean_square.by_definition("cuda", differentiable=True)
sharded_rms_norm.by_definition("cpu", "cuda", invariant=True, differentiable=True)


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


def _round_triton(x: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, **_given(*rounding))


def _sum_round_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, residual, **_given(*rounding))


def _wide_round_triton(x: Tensor, weight: Tensor, eps: float, offset: float, *rounding: Any) -> Rounded:
    return launch_norm(x, weight, eps, offset=offset, **_given(*rounding))


def _round_fits(x: Tensor, weight: Tensor, eps: float, kind: str, columns: int, *_: Any) -> bool:
    """A tile holds a whole row, and whole groups of it."""
    whole = columns <= row_tile(x.shape[-1])[0]["WIDTH"] and x.shape[-1] <= MAX_COLUMNS
    return x.dim() == 2 and x.dtype != torch.float64 and whole and can_round(x, kind, columns)


def _sum_round_fits(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rounding: Any) -> bool:
    return alike(x, residual) and _round_fits(x, weight, eps, *rounding)


def _wide_round_fits(x: Tensor, weight: Tensor, eps: float, offset: float, *rounding: Any) -> bool:
    return _round_fits(x, weight, eps, *rounding)


rms_norm_round.in_triton(_round_triton, invariant=True, supports=_round_fits, kernels=(rms_norm_kernel,))
add_rms_norm_round.in_triton(_sum_round_triton, invariant=True, supports=_sum_round_fits, kernels=(rms_norm_kernel,))
wide_rms_norm_round.in_triton(_wide_round_triton, invariant=True, supports=_wide_round_fits, kernels=(rms_norm_kernel,))
