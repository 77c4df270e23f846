"""Weights that are 2:4 sparse and compressed become dense: inside Triton kernels, and whole ones in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight
from strata.kernels.quant.two_of_four import BYTE_COLUMNS
from strata.kernels.triton_import import HAS_TRITON, jit, tl


@jit
def _four_columns(pair, code, kind: tl.constexpr):
    """Two 16-bit floats in the low half of `pair`, and the places of both in the low half of `code`: four floats."""
    first = (pair & 0xFFFF).to(tl.uint16)
    second = ((pair >> 16) & 0xFFFF).to(tl.uint16)
    one, other = code & 3, (code >> 2) & 3
    zero = first & 0
    a = tl.where(one == 0, first, zero)
    b = tl.where(one == 1, first, tl.where(other == 1, second, zero))
    c = tl.where(one == 2, first, tl.where(other == 2, second, zero))
    d = tl.where(other == 3, second, zero)
    return (a.to(kind, bitcast=True), b.to(kind, bitcast=True), c.to(kind, bitcast=True), d.to(kind, bitcast=True))


@jit
def eight_columns(values, places, kind: tl.constexpr):
    """Four 16-bit floats each in int64 `values`, and bytes with their places: the floats in each of eight columns."""
    a, b, c, d = _four_columns(values, places, kind)
    e, f, g, h = _four_columns(values >> 32, places >> 4, kind)
    return a, b, c, d, e, f, g, h


@jit
def expand_kernel(
    values, places, result, out, eights, value_stride, place_stride, BLOCK_N: tl.constexpr, BLOCK_EIGHTS: tl.constexpr
):
    """Programs [rows / BLOCK_N, eights of columns / BLOCK_EIGHTS]; strides in eights of columns."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    eight = tl.program_id(1) * BLOCK_EIGHTS + tl.arange(0, BLOCK_EIGHTS)
    held = (row < out)[:, None] & (eight < eights)[None, :]
    kept = tl.load(values + row[:, None] * value_stride + eight[None, :], mask=held, other=0)
    where = tl.load(places + row[:, None] * place_stride + eight[None, :], mask=held, other=0)
    a, b, c, d, e, f, g, h = eight_columns(kept, where, result.dtype.element_ty)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    wide = tl.reshape(tl.join(even, odd), (BLOCK_N, 8 * BLOCK_EIGHTS))
    column = tl.program_id(1) * (8 * BLOCK_EIGHTS) + tl.arange(0, 8 * BLOCK_EIGHTS)
    target = result + row[:, None] * (8 * eights) + column[None, :]
    tl.store(target, wide, mask=(row < out)[:, None] & (column < 8 * eights)[None, :])


_BLOCK_N, _BLOCK_EIGHTS, _WARPS = 16, 32, 4


def expand_on_device(weight: QuantizedWeight) -> Tensor:
    """A weight [out, width] of 2:4 sparsity on a CUDA device, dense, in the dtype of its values: [out, width]."""
    out, width = weight.shape
    result = torch.empty((out, width), dtype=weight.values.dtype, device=weight.device)
    if result.numel():
        values, eights = weight.values.view(torch.int64), width // BYTE_COLUMNS
        sizes = (out, eights, values.stride(0), weight.scales.stride(0))
        known = {"BLOCK_N": _BLOCK_N, "BLOCK_EIGHTS": _BLOCK_EIGHTS, "num_warps": _WARPS}
        grid = (ceil_div(out, _BLOCK_N), ceil_div(eights, _BLOCK_EIGHTS))
        expand_kernel[grid](values, weight.scales, result, *sizes, **known)
    return result


def can_expand(weight: QuantizedWeight) -> bool:
    """Whether the kernel can read a weight where it is: of 16 bits, rows that start at multiples of 8 bytes."""
    values = weight.values
    return (
        HAS_TRITON
        and weight.kind == TWO_OF_FOUR
        and weight.dim() == 2
        and values.dtype in (torch.bfloat16, torch.float16)
        and values.stride(1) == weight.scales.stride(1) == 1
        and values.stride(0) % 4 == 0
        and values.data_ptr() % 8 == 0
    )
