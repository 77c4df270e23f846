"""Root-mean-square layer normalization (Zhang and Sennrich 2019), of a tensor or of the sum of two."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.torch_functions import add
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(x: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


@operation(_cost, rowwise=True)
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


@fused(rowwise=True, backward=_sum_backward_cost)
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
    x, weight, result, rows, heads, token_stride, head_stride, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    start = (row // heads).to(tl.int64) * token_stride + row % heads * head_stride
    values = tl.load(x + start + column, mask=held, other=0.0)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    normed = scaled(values, inverse_rms(values, width, eps), factor)
    tl.store(result + row.to(tl.int64) * width + column, normed, mask=held)


@partial(jit, unspecialized=("rows",))
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    result,
    rows,
    x_stride,
    residual_stride,
    width,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    left = tl.load(x + row * x_stride + column, mask=held, other=0.0)
    right = tl.load(residual + row * residual_stride + column, mask=held, other=0.0)
    values = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    normed = scaled(values, inverse_rms(values, width, eps), factor)
    # Both at the end: the values keep the threads that loaded them, as in `rms_norm_kernel`.
    tl.store(total + row * width + column, values, mask=held)
    tl.store(result + row * width + column, normed, mask=held)


def _triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A program takes one row, or several short ones: how many, and its threads, depend on the width only."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    # Two row strides serve the heads of a merged projection.
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, width)
    count = rows.shape[0] * rows.shape[1]
    if count:
        tile, warps = row_tile(width)
        rms_norm_kernel[(ceil_div(count, tile["ROWS"]),)](
            rows,
            weight,
            result,
            count,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            width,
            eps,
            **tile,
            num_warps=warps,
        )
    return result


def _sum_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The tiles of `rms_norm`, so that each row is summed in the same order."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows, others = x.reshape(-1, width), residual.reshape(-1, width)
    if x.numel():
        tile, warps = row_tile(width)
        add_rms_norm_kernel[(ceil_div(rows.shape[0], tile["ROWS"]),)](
            rows,
            others,
            weight,
            total,
            result,
            rows.shape[0],
            rows.stride(0),
            others.stride(0),
            width,
            eps,
            **tile,
            num_warps=warps,
        )
    return total, result


def row_tile(width: int) -> tuple[dict[str, int], int]:
    """Rows and padded width of a tile, and its warps. Kernels that share it sum a row in the same order."""
    padded: int = next_power_of_2(width)
    return {"ROWS": max(1, 1024 // padded), "WIDTH": padded}, min(max(padded // 512, 4), 16)


def _fits(x: Tensor, weight: Tensor, eps: float) -> bool:
    return x.shape[-1] <= 16384 and x.stride(-1) == 1 and x.dtype != torch.float64


def _sum_fits(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    alike = x.shape == residual.shape and x.dtype == residual.dtype
    return alike and _fits(x, weight, eps) and residual.stride(-1) == 1


if HAS_TRITON:
    rms_norm.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(rms_norm_kernel,))(_triton)
    add_rms_norm.implement("triton", "cuda", invariant=True, supports=_sum_fits, kernels=(add_rms_norm_kernel,))(
        _sum_triton
    )


def compile_cases() -> list[CompileCase]:
    pointers = dict.fromkeys(("x", "residual", "weight", "total", "result"), "*bf16:16")
    strides = dict.fromkeys(("token_stride", "head_stride", "x_stride", "residual_stride", "width"), "i32:16")
    signature = pointers | {"rows": "i32", "heads": "i32", "eps": "fp32"} | strides
    cases = []
    for width in (128, 4096, 16384):
        tile, warps = row_tile(width)
        cases.append(CompileCase(f"rms_norm of {width}", rms_norm_kernel, signature, dict(tile), warps, 2))
        cases.append(CompileCase(f"add_rms_norm of {width}", add_rms_norm_kernel, signature, dict(tile), warps, 2))
    return cases
