"""Rotary position embedding (Su et al. 2021), with the halves of a head as the two coordinates of each rotation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _angles_cost(positions: Tensor, table: Tensor, *, workload: Workload) -> Cost:
    rows = positions.numel() * table.shape[1] * table.element_size()
    return Cost(flops=rows // (2 * table.element_size()), read=positions.nbytes + rows, written=2 * rows)


def _angles_meta(positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, table.shape[1])
    return table.new_empty(shape, device="meta"), table.new_empty(shape, device="meta")


def _no_cost(*args: Tensor, workload: Workload) -> Cost:
    return Cost()  # positions have no gradient


@operation(_angles_cost, meta=_angles_meta, rowwise=True, backward=_no_cost)
def rope_angles(positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """What `rope` multiplies by, looked up once for all layers.

    positions [tokens] int32, table [max_length, head_dim] float32, cosines in the first half of a row and sines in the
    second -> cosines and sines [tokens, 1, head_dim], both given twice; the first half of the sines is negated.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


rope_angles.by_definition("cpu", invariant=True)


def _cost(x: Tensor, cos: Tensor, sin: Tensor, *_: bool, workload: Workload) -> Cost:
    # A rotation of a pair is four products and two sums. Half of the cosines and sines repeat the other half.
    rotated = x.numel() // x.shape[-1] * cos.shape[-1]
    return Cost(flops=3 * rotated, read=x.nbytes + (cos.nbytes + sin.nbytes) // 2, written=x.nbytes)


@operation(_cost, rowwise=True, backward=_cost)  # the gradient is rotated back
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by the angles of its token's position.

    x [tokens, heads, head_dim], cos and sin of `rope_angles` -> like x. Element i and element i + head_dim / 2 of a
    head are the coordinates of rotation i. Computed in float32 (float64 for float64 input).
    """
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


@rope.implement("torch", "cpu", invariant=True)
def _torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The reference with fewer temporaries. Each product and sum is rounded once, so no bit depends on the shape.
    wide = x if x.dtype == cos.dtype else x.to(torch.promote_types(x.dtype, cos.dtype))
    return wide.roll(x.shape[-1] // 2, -1).mul_(sin).add_(wide * cos).to(x.dtype)


@operation(_cost, rowwise=True)
def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of the first dimensions of each head, as many as the angles have; the others stay (GPT-NeoX, Black et al.
    2022).

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dims] of `rope_angles`, dims <= head_dim -> like x.
    """
    dims = cos.shape[-1]
    return torch.cat((rope.reference(x[..., :dims], cos, sin), x[..., dims:]), -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """`rope` of heads [tokens, heads, dims]. paired: elements 2i and 2i + 1 are the coordinates of rotation i; they
    become elements i and i + dims / 2."""
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if paired else x
    found: Tensor = rope.reference(halves, cos, sin)
    return found


@operation(_cost, rowwise=True, backward=_cost)
def tail_rope(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """Rotate the last dimensions of each head, as many as the angles have; those in front stay (DeepSeek-V2).

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dims] of `rope_angles`, dims <= head_dim -> like x. paired:
    neighbours are the coordinates of a rotation, and the first ones of all come to stand in front of the second ones
    (`rope_interleave` of transformers' DeepSeek-V3): scores of queries and keys that both went through here are those
    of pairs left in place. Otherwise as `rope`.
    """
    kept = x.shape[-1] - cos.shape[-1]
    return torch.cat((x[..., :kept], turned(x[..., kept:], cos, sin, paired)), -1)


for _operation in (partial_rope, tail_rope):
    _operation.by_definition("cpu", invariant=True, differentiable=True)


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("positions",))
def rope_angles_kernel(positions, table, cos, sin, half, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    held = column < half
    source = table + tl.load(positions + token).to(tl.int64) * (2 * half) + column
    target = token * (2 * half) + column
    value = tl.load(source, mask=held, other=0.0)
    tl.store(cos + target, value, mask=held)
    tl.store(cos + target + half, value, mask=held)
    value = tl.load(source + half, mask=held, other=0.0)
    tl.store(sin + target, -value, mask=held)
    tl.store(sin + target + half, value, mask=held)


def _angles_triton(positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    tokens, head_dim = positions.shape[0], table.shape[1]
    cos, sin = torch.empty((2, tokens, 1, head_dim), dtype=table.dtype, device=table.device)
    if cos.numel():
        padded = next_power_of_2(head_dim // 2)
        rope_angles_kernel[(tokens,)](positions, table, cos, sin, head_dim // 2, HALF=padded, num_warps=1)
    return cos, sin


@jit
def rotate(first, second, cos, sin):
    """Both halves of a rotated head, in float32. Explicit fused multiply-adds give every kernel the same bits."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@jit
def rotated_pairs(x, cos, sin, pair, half, held, PAIRED: tl.constexpr):
    """Both coordinates of the rotations `pair`, of 2 * half elements from x on; cos, sin: of the second half's angles.
    Float32."""
    step = 2 if PAIRED else 1
    first = tl.load(x + pair * step, mask=held, other=0.0).to(tl.float32)
    second = tl.load(x + (pair * 2 + 1 if PAIRED else pair + half), mask=held, other=0.0).to(tl.float32)
    return rotate(first, second, cos, sin)


@jit
def rope_kernel(
    x,
    cos,
    sin,
    result,
    heads,
    kept,
    half,
    token_stride,
    head_stride,
    IS_TAIL: tl.constexpr,
    PAIRED: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
):
    """Programs [tokens, heads / HEADS]. kept: dimensions that stay, behind the 2 * half that are rotated or, if
    IS_TAIL, in front of them; None: all are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    angle = token * (2 * half) + half + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    held = (head < heads) & (pair < half)
    source = x + token * token_stride + head * head_stride
    first, second = rotated_pairs(source + kept if IS_TAIL else source, c, s, pair, half, held, PAIRED)
    target = result + (token * heads + head) * (2 * half if kept is None else 2 * half + kept)
    turned = (target + kept if IS_TAIL else target) + pair
    tl.store(turned, first.to(result.dtype.element_ty), mask=held)
    tl.store(turned + half, second.to(result.dtype.element_ty), mask=held)
    if kept is not None:
        column = tl.arange(0, KEPT)[None, :]
        stays = (head < heads) & (column < kept)
        place = column if IS_TAIL else 2 * half + column
        tl.store(target + place, tl.load(source + place, mask=stays, other=0.0), mask=stays)


def _triton(x: Tensor, cos: Tensor, sin: Tensor, paired: bool | None = None) -> Tensor:
    """paired: of `tail_rope`; None: what is rotated stands in front."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    half = cos.shape[-1] // 2
    kept = head_dim - 2 * half
    if result.numel():
        columns, pairs = next_power_of_2(max(1, kept)), next_power_of_2(half)
        together = min(next_power_of_2(heads), max(1, 2048 // max(columns, pairs)))
        rope_kernel[(tokens, ceil_div(heads, together))](
            *(x, cos, sin, result, heads, kept or None, half, *x.stride()[:2]),
            IS_TAIL=paired is not None and kept > 0,
            PAIRED=bool(paired),
            HEADS=together,
            KEPT=columns,
            HALF=pairs,
            num_warps=4,
        )
    return result


def _fits(x: Tensor, *_: object) -> bool:
    return x.dtype != torch.float64 and x.stride(-1) == 1


rope_angles.in_triton(
    _angles_triton,
    invariant=True,
    supports=lambda _, table: table.dtype == torch.float32,
    kernels=(rope_angles_kernel,),
)
for _operation in (rope, partial_rope, tail_rope):
    _operation.in_triton(_triton, invariant=True, supports=_fits, kernels=(rope_kernel,))
partial_rope.by_definition("cuda", invariant=True, differentiable=True)
tail_rope.by_definition("cuda", differentiable=True)
