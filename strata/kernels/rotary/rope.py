"""Rotary position embedding (Su et al. 2021), with the halves of a head as the two coordinates of each rotation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


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


rope_angles.implement("torch", "cpu", invariant=True)(rope_angles.reference)


def _cost(x: Tensor, cos: Tensor, sin: Tensor, *, workload: Workload) -> Cost:
    # A rotation of a pair is four products and two sums. Half of the cosines and sines repeat the other half.
    return Cost(flops=3 * x.numel(), read=x.nbytes + (cos.nbytes + sin.nbytes) // 2, written=x.nbytes)


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
def rope_kernel(x, cos, sin, result, heads, half, token_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    angle = token * (2 * half) + half + column
    c = tl.load(cos + angle, mask=column < half, other=0.0)
    s = tl.load(sin + angle, mask=column < half, other=0.0)
    held = (head < heads) & (column < half)
    source = x + token * token_stride + head * head_stride + column
    first = tl.load(source, mask=held, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=held, other=0.0).to(tl.float32)
    first, second = rotate(first, second, c, s)
    target = result + (token * heads + head) * (2 * half) + column
    tl.store(target, first.to(result.dtype.element_ty), mask=held)
    tl.store(target + half, second.to(result.dtype.element_ty), mask=held)


def _triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    if result.numel():
        tile = _tile(heads, head_dim // 2)
        rope_kernel[(tokens, ceil_div(heads, tile["HEADS"]))](
            x, cos, sin, result, heads, head_dim // 2, x.stride(0), x.stride(1), **tile, num_warps=4
        )
    return result


def _tile(heads: int, half: int) -> dict[str, int]:
    columns: int = next_power_of_2(half)
    return {"HEADS": min(next_power_of_2(heads), max(1, 2048 // columns)), "HALF": columns}


if HAS_TRITON:
    rope_angles.implement(
        "triton",
        "cuda",
        invariant=True,
        supports=lambda _, table: table.dtype == torch.float32,
        kernels=(rope_angles_kernel,),
    )(_angles_triton)
    rope.implement(
        "triton", "cuda", invariant=True, supports=lambda x, *_: x.dtype != torch.float64, kernels=(rope_kernel,)
    )(_triton)
