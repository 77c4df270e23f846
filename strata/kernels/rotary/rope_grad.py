"""Rotation with gradients on CUDA: of heads by themselves, and of queries and keys in one product with the values.

A rotation is orthogonal: its gradient is the rotation by the negative angle. Importing this file registers both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.plain_tensor import all_plain
from strata.kernels.rotary.rope import rope, rotate
from strata.kernels.state.qk_rope_kv_write import HeadsCall, qk_rope_kv_write
from strata.kernels.triton_import import jit, tl


@jit
def _part(buffer, token, head, first, heads, half, column):
    """Where heads `first` to `first + heads` stand in a buffer [tokens, heads, 2 * half], and which these are."""
    own = head - first
    return buffer + (token * heads + own) * (2 * half) + column, (own >= 0) & (own < heads) & (column < half)


@jit
def rotate_heads_kernel(
    product,
    q,
    k,
    v,
    cos,
    sin,
    heads,
    kv_heads,
    half,
    token_stride,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """A program a token: from product to q, k (rotated) and v, or if BACKWARD from these (rotated back) to product."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    last_key = heads + kv_heads
    in_product = product + token * token_stride + head * (2 * half) + column
    held = (head < last_key + kv_heads) & (column < half)
    in_q, is_q = _part(q, token, head, 0, heads, half, column)
    in_k, is_k = _part(k, token, head, heads, kv_heads, half, column)
    in_v, is_v = _part(v, token, head, last_key, kv_heads, half, column)
    if BACKWARD:
        first = tl.load(in_q, mask=is_q, other=0.0) + tl.load(in_k, mask=is_k, other=0.0)
        first += tl.load(in_v, mask=is_v, other=0.0)
        second = tl.load(in_q + half, mask=is_q, other=0.0) + tl.load(in_k + half, mask=is_k, other=0.0)
        second += tl.load(in_v + half, mask=is_v, other=0.0)
    else:
        first = tl.load(in_product, mask=held, other=0.0)
        second = tl.load(in_product + half, mask=held, other=0.0)
    angle = token * (2 * half) + half + column
    c = tl.load(cos + angle, mask=column < half, other=0.0)
    s = tl.load(sin + angle, mask=column < half, other=0.0)
    if BACKWARD:
        s = -s
    turns = head < last_key
    one, other = rotate(first.to(tl.float32), second.to(tl.float32), c, s)
    one = tl.where(turns, one, first.to(tl.float32)).to(product.dtype.element_ty)
    other = tl.where(turns, other, second.to(tl.float32)).to(product.dtype.element_ty)
    if BACKWARD:
        tl.store(in_product, one, mask=held)
        tl.store(in_product + half, other, mask=held)
    else:
        tl.store(in_q, one, mask=is_q)
        tl.store(in_q + half, other, mask=is_q)
        tl.store(in_k, one, mask=is_k)
        tl.store(in_k + half, other, mask=is_k)
        tl.store(in_v, one, mask=is_v)
        tl.store(in_v + half, other, mask=is_v)


_WARPS = 4


def _tile(heads: int, half: int) -> dict[str, int]:
    return {"HEADS": next_power_of_2(heads), "HALF": next_power_of_2(half)}


def _launch(product: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, backward: bool) -> None:
    q, k, _ = parts
    tokens, heads, head_dim = q.shape
    if tokens:
        kv_heads, half = k.shape[1], head_dim // 2
        tile = _tile(heads + 2 * kv_heads, half)
        rotate_heads_kernel[(tokens,)](
            *(product, *parts, cos, sin, heads, kv_heads, half, product.stride(0)),
            BACKWARD=backward,
            **tile,
            num_warps=_WARPS,
        )


class _Heads(torch.autograd.Function):
    """product [tokens, (heads + 2 * kv_heads) * head_dim] to q, k, v [tokens, heads, head_dim]; keeps the angles."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kinds = (heads, kv_heads, kv_heads)
        q, k, v = (product.new_empty((product.shape[0], kind, cos.shape[-1])) for kind in kinds)
        _launch(product, (q, k, v), cos, sin, backward=False)
        ctx.save_for_backward(cos, sin)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        parts = tuple(part.contiguous() for part in upstream)
        tokens, head_dim = parts[0].shape[0], cos.shape[-1]
        of_product = parts[0].new_empty((tokens, sum(part.shape[1] for part in parts) * head_dim))
        _launch(of_product, parts, cos, sin, backward=True)
        return of_product, None, None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rope(x, cos, sin)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rope(upstream[0].contiguous(), cos, -sin), None, None


def _fits(call: HeadsCall) -> bool:
    """No norms of heads, no pages. A program holds all heads of a token."""
    product, q_weight, _, cos, _, pages, spec = call
    few = (spec.heads + 2 * spec.kv_heads) * cos.shape[-1] <= 16384
    return q_weight is None and pages is None and few and all_plain(product) and product.stride(-1) == 1


def _differentiable_heads(call: HeadsCall) -> tuple[Tensor, Tensor, Tensor]:
    return _Heads.apply(call.product, call.spec.heads, call.spec.kv_heads, call.cos, call.sin)  # type: ignore[no-any-return]


_rope = rope.bind("cuda")
rope.in_triton(_Rope.apply, "triton with gradients", differentiable=True, supports=lambda x, *_: all_plain(x))
qk_rope_kv_write.in_triton(_differentiable_heads, "triton with gradients", differentiable=True, supports=_fits)
