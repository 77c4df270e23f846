"""Rotary position embedding (Su et al. 2021), with the halves of a head as the two coordinates of each rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl, triton


def _cost(x: Tensor, positions: Tensor, table: Tensor, *, workload: Workload) -> Cost:
    # A rotation of a pair is four products and two sums.
    angles = positions.numel() * table.shape[1] * table.element_size()
    return Cost(flops=3 * x.numel(), read=x.nbytes + positions.nbytes + angles, written=x.nbytes)


def _meta(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(x.shape, device="meta")


@operation(_cost, meta=_meta)
def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate each head by the angles of its token's position.

    x [tokens, heads, head_dim], positions [tokens] int32, table [max_length, head_dim] float32 -> like x. The first
    half of a table row are the cosines, the second the sines. Element i and element i + head_dim / 2 of a head are
    the coordinates of rotation i. Computed in float32 (float64 for float64 input).
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@rope.implement("torch", "cpu", invariant=True)
def _torch(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    # The reference with fewer temporaries. Each product and sum is rounded once, so no bit depends on the shape.
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    head = (first * cos).sub_(second * sin)
    tail = (second * cos).add_(first * sin)
    return torch.cat((head, tail), -1).to(x.dtype)


@jit
def rope_kernel(
    x, positions, table, result, heads, half, token_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    angle = table + tl.load(positions + token).to(tl.int64) * (2 * half) + column
    cos = tl.load(angle, mask=column < half, other=0.0)
    sin = tl.load(angle + half, mask=column < half, other=0.0)
    held = (head < heads) & (column < half)
    source = x + token * token_stride + head * head_stride + column
    first = tl.load(source, mask=held, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=held, other=0.0).to(tl.float32)
    target = result + (token * heads + head) * (2 * half) + column
    tl.store(target, (first * cos - second * sin).to(result.dtype.element_ty), mask=held)
    tl.store(target + half, (second * cos + first * sin).to(result.dtype.element_ty), mask=held)


def _triton(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    if result.numel():
        tile = _tile(heads, head_dim // 2)
        rope_kernel[(tokens, triton.cdiv(heads, tile["HEADS"]))](
            x, positions, table, result, heads, head_dim // 2, x.stride(0), x.stride(1), **tile, num_warps=4
        )
    return result


def _tile(heads: int, half: int) -> dict[str, int]:
    columns: int = triton.next_power_of_2(half)
    return {"HEADS": min(triton.next_power_of_2(heads), max(1, 2048 // columns)), "HALF": columns}


if HAS_TRITON:
    rope.implement("triton", "cuda", invariant=True, supports=lambda x, *_: x.dtype != torch.float64)(_triton)


def compile_cases() -> list[CompileCase]:
    signature = {
        "x": "*bf16:16",
        "positions": "*i32:16",
        "table": "*fp32:16",
        "result": "*bf16:16",
        "heads": "i32",
        "half": "i32:16",
        "token_stride": "i32:16",
        "head_stride": "i32:16",
    }
    return [CompileCase("rope", rope_kernel, signature, dict(_tile(32, 64)), 4, 2)]
