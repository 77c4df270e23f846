"""RMS norm whose weights multiply in float32, before the result is rounded: OLMo 2 and 3, Gemma (there as 1 + w)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.norm.norm import inverse_rms, row_tile
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(x: Tensor, weight: Tensor, eps: float, offset: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


@operation(_cost, rowwise=True)
def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension (Zhang and Sennrich 2019).

    x [..., width], weight [width] of the same dtype -> [..., width]. All of it is computed in float32 (float64 for
    float64 input) and rounded once, as in transformers' Olmo2RMSNorm (offset 0) and Gemma3RMSNorm (offset 1).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


# A row is reduced in an order that depends on its width only.
wide_rms_norm.implement("torch", "cpu", invariant=True, differentiable=True)(wide_rms_norm.reference)


@partial(jit, unspecialized=("rows",))
def wide_rms_norm_kernel(
    x,
    weight,
    result,
    rows,
    heads,
    token_stride,
    head_stride,
    width,
    eps,
    offset,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    start = (row // heads).to(tl.int64) * token_stride + row % heads * head_stride
    values = tl.load(x + start + column, mask=held, other=0.0)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    normed = values.to(tl.float32) * inverse_rms(values, width, eps) * factor
    tl.store(result + row.to(tl.int64) * width + column, normed.to(values.dtype), mask=held)


def _triton(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """The tiles of `rms_norm`: a program takes one row, or several short ones."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    # Two row strides serve the heads of a merged projection.
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, width)
    count = rows.shape[0] * rows.shape[1]
    if count:
        tile, warps = row_tile(width)
        wide_rms_norm_kernel[(ceil_div(count, tile["ROWS"]),)](
            rows,
            weight,
            result,
            count,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            width,
            eps,
            offset,
            **tile,
            num_warps=warps,
        )
    return result


def _fits(x: Tensor, weight: Tensor, eps: float, offset: float) -> bool:
    return x.shape[-1] <= 16384 and x.stride(-1) == 1 and x.dtype != torch.float64


if HAS_TRITON:
    wide_rms_norm.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(wide_rms_norm_kernel,))(_triton)
wide_rms_norm.implement("torch", "cuda", differentiable=True)(wide_rms_norm.reference)


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("x", "weight", "result"), "*bf16:16")
    signature |= dict.fromkeys(("token_stride", "head_stride", "width"), "i32:16")
    signature |= {"rows": "i32", "heads": "i32", "eps": "fp32", "offset": "fp32"}
    cases = []
    for width in (256, 4096):
        tile, warps = row_tile(width)
        cases.append(CompileCase(f"wide_rms_norm of {width}", wide_rms_norm_kernel, signature, dict(tile), warps, 2))
    return cases
