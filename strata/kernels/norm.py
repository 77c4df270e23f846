"""Root-mean-square layer normalization (Zhang and Sennrich 2019)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl, triton


def _cost(x: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


def _meta(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, device="meta")


@operation(_cost, meta=_meta)
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


@partial(jit, unspecialized=("rows",))
def rms_norm_kernel(
    x, weight, result, rows, heads, token_stride, head_stride, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    start = (row // heads).to(tl.int64) * token_stride + row % heads * head_stride
    values = tl.load(x + start + column, mask=held, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)[:, None]
    rounded = (wide * scale).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(result + row.to(tl.int64) * width + column, (rounded * factor).to(values.dtype), mask=held)


def _triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A program takes one row, or several short ones: how many, and its threads, depend on the width only."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    # Two row strides serve the heads of a merged projection.
    rows = x if x.dim() == 3 else x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, width)
    count = rows.shape[0] * rows.shape[1]
    if count:
        tile, warps = _tile(width)
        rms_norm_kernel[(triton.cdiv(count, tile["ROWS"]),)](
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


def _tile(width: int) -> tuple[dict[str, int], int]:
    padded: int = triton.next_power_of_2(width)
    return {"ROWS": max(1, 1024 // padded), "WIDTH": padded}, min(max(padded // 512, 4), 16)


def _fits(x: Tensor, weight: Tensor, eps: float) -> bool:
    return x.shape[-1] <= 16384 and x.stride(-1) == 1 and x.dtype != torch.float64


if HAS_TRITON:
    rms_norm.implement("triton", "cuda", invariant=True, supports=_fits)(_triton)


def compile_cases() -> list[CompileCase]:
    cases = []
    for width in (128, 4096, 16384):
        tile, warps = _tile(width)
        signature = {
            "x": "*bf16:16",
            "weight": "*bf16:16",
            "result": "*bf16:16",
            "rows": "i32",
            "heads": "i32",
            "token_stride": "i32:16",
            "head_stride": "i32:16",
            "width": "i32:16",
            "eps": "fp32",
        }
        cases.append(CompileCase(f"rms_norm of {width}", rms_norm_kernel, signature, dict(tile), warps, 2))
    return cases
