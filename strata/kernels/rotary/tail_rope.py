"""Rotary position embedding of the last dimensions of each head, in pairs of neighbours or of halves (DeepSeek-V2)."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.rotary.rope import rope, rotate
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(x: Tensor, cos: Tensor, sin: Tensor, paired: bool, *, workload: Workload) -> Cost:
    rotated = x.numel() // x.shape[-1] * cos.shape[-1]
    return Cost(flops=3 * rotated, read=x.nbytes + (cos.nbytes + sin.nbytes) // 2, written=x.nbytes)


def turned(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """`rope` of heads [tokens, heads, dims]. paired: elements 2i and 2i + 1 are the coordinates of rotation i; they
    become elements i and i + dims / 2."""
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if paired else x
    found: Tensor = rope.reference(halves, cos, sin)
    return found


@operation(_cost, rowwise=True, backward=_cost)  # the gradient is rotated back
def tail_rope(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """Rotate the last dimensions of each head, as many as the angles have; those in front stay.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dims] of `rope_angles`, dims <= head_dim -> like x. paired:
    neighbours are the coordinates of a rotation, and the first ones of all come to stand in front of the second ones
    (`rope_interleave` of transformers' DeepSeek-V3): scores of queries and keys that both went through here are those
    of pairs left in place. Otherwise as `rope`.
    """
    kept = x.shape[-1] - cos.shape[-1]
    return torch.cat((x[..., :kept], turned(x[..., kept:], cos, sin, paired)), -1)


tail_rope.implement("torch", "cpu", invariant=True, differentiable=True)(tail_rope.reference)


@jit
def rotated_tail(x, cos, sin, pair, half, held, PAIRED: tl.constexpr):
    """Both coordinates of the rotations `pair`, of 2 * half elements from x on; cos, sin: of the second half's angles.
    Float32."""
    step = 2 if PAIRED else 1
    first = tl.load(x + pair * step, mask=held, other=0.0).to(tl.float32)
    second = tl.load(x + (pair * 2 + 1 if PAIRED else pair + half), mask=held, other=0.0).to(tl.float32)
    return rotate(first, second, cos, sin)


@jit
def tail_rope_kernel(
    x,
    cos,
    sin,
    result,
    heads,
    kept,
    half,
    token_stride,
    head_stride,
    PAIRED: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, KEPT)[None, :]
    held = (head < heads) & (column < kept)
    source = x + token * token_stride + head * head_stride
    target = result + (token * heads + head) * (kept + 2 * half)
    tl.store(target + column, tl.load(source + column, mask=held, other=0.0), mask=held)
    pair = tl.arange(0, HALF)[None, :]
    angle = token * (2 * half) + half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    held = (head < heads) & (pair < half)
    first, second = rotated_tail(source + kept, c, s, pair, half, held, PAIRED)
    tl.store(target + kept + pair, first.to(result.dtype.element_ty), mask=held)
    tl.store(target + kept + half + pair, second.to(result.dtype.element_ty), mask=held)


def _tile(heads: int, kept: int, half: int) -> dict[str, int]:
    columns: int = next_power_of_2(max(1, kept))
    return {
        "HEADS": min(next_power_of_2(heads), max(1, 2048 // columns)),
        "KEPT": columns,
        "HALF": next_power_of_2(half),
    }


def _triton(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    half = cos.shape[-1] // 2
    if result.numel():
        tile = _tile(heads, head_dim - 2 * half, half)
        tail_rope_kernel[(tokens, ceil_div(heads, tile["HEADS"]))](
            x,
            cos,
            sin,
            result,
            heads,
            head_dim - 2 * half,
            half,
            x.stride(0),
            x.stride(1),
            PAIRED=paired,
            **tile,
            num_warps=4,
        )
    return result


def _fits(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> bool:
    return x.dtype != torch.float64 and x.stride(-1) == 1


if HAS_TRITON:
    tail_rope.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(tail_rope_kernel,))(_triton)
tail_rope.implement("torch", "cuda", differentiable=True)(tail_rope.reference)
