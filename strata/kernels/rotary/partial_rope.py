"""Rotary position embedding of the first dimensions of each head; the others stay (GPT-NeoX, Black et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.rotary.rope import rope, rotate
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(x: Tensor, cos: Tensor, sin: Tensor, *, workload: Workload) -> Cost:
    rotated = x.numel() // x.shape[-1] * cos.shape[-1]
    return Cost(flops=3 * rotated, read=x.nbytes + (cos.nbytes + sin.nbytes) // 2, written=x.nbytes)


@operation(_cost, rowwise=True)
def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of the first dimensions of each head, as many as the angles have.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dims] of `rope_angles`, dims <= head_dim -> like x.
    """
    dims = cos.shape[-1]
    return torch.cat((rope.reference(x[..., :dims], cos, sin), x[..., dims:]), -1)


partial_rope.implement("torch", "cpu", invariant=True, differentiable=True)(partial_rope.reference)


@jit
def partial_rope_kernel(
    x,
    cos,
    sin,
    result,
    heads,
    kept,
    half,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
):
    """Programs [tokens, heads / HEADS]. kept: dimensions that stay, behind the 2 * half that are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source = x + token * token_stride + head * head_stride
    target = result + (token * heads + head) * (2 * half + kept)
    pair = tl.arange(0, HALF)[None, :]
    angle = token * (2 * half) + half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    held = (head < heads) & (pair < half)
    first = tl.load(source + pair, mask=held, other=0.0).to(tl.float32)
    second = tl.load(source + half + pair, mask=held, other=0.0).to(tl.float32)
    first, second = rotate(first, second, c, s)
    tl.store(target + pair, first.to(result.dtype.element_ty), mask=held)
    tl.store(target + half + pair, second.to(result.dtype.element_ty), mask=held)
    column = tl.arange(0, KEPT)[None, :]
    held = (head < heads) & (column < kept)
    tl.store(target + 2 * half + column, tl.load(source + 2 * half + column, mask=held, other=0.0), mask=held)


def _tile(heads: int, kept: int, half: int) -> dict[str, int]:
    columns: int = next_power_of_2(max(1, kept))
    return {
        "HEADS": min(next_power_of_2(heads), max(1, 2048 // max(columns, next_power_of_2(half)))),
        "KEPT": columns,
        "HALF": next_power_of_2(half),
    }


def _triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    half = cos.shape[-1] // 2
    if result.numel():
        kept = head_dim - 2 * half
        tile = _tile(heads, kept, half)
        grid = (tokens, ceil_div(heads, tile["HEADS"]))
        strides = x.stride(0), x.stride(1)
        partial_rope_kernel[grid](x, cos, sin, result, heads, kept, half, *strides, **tile, num_warps=4)
    return result


def _fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return x.dtype != torch.float64 and x.stride(-1) == 1


if HAS_TRITON:
    partial_rope.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(partial_rope_kernel,))(_triton)
partial_rope.implement("torch", "cuda", invariant=True, differentiable=True)(partial_rope.reference)
