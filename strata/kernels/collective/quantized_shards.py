"""Rows that ranks add up in 8 bits: each rank rounds what it sends, and the sums that it sends back.

A part is the columns of one rank. Of a row it is its values in e4m3 and, behind them, the exponents of its groups of
`GROUP` columns (E8M0, see `strata.kernels.state.quantized_rows`), both filled up to 16 bytes. So 4,096 columns in
bfloat16, 8,192 bytes, are 4,096 + 32 bytes and what fills them up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.quant.dequantize import E4M3_CAPABILITY
from strata.kernels.state.quantized_rows import round_rows, widen_rows
from strata.kernels.state.quantized_triton import powers_of, rounding_constants
from strata.kernels.state.quantized_triton import round_rows as rounded_in_kernel
from strata.kernels.triton_import import jit, tl

GROUP = 128
_E4M3 = torch.float8_e4m3fn
_WORDS = 16  # bytes that are loaded at once


def shard_bytes(width: int) -> int:
    """Of a row of a part of `width` columns."""
    return _filled(width) + _filled(ceil_div(width, GROUP))


def _filled(nbytes: int) -> int:
    return ceil_div(nbytes, _WORDS) * _WORDS


def _round_cost(x: Tensor, ranks: int, *, workload: Workload) -> Cost:
    # The largest magnitude, a multiplication and the rounding.
    return Cost(3 * x.numel(), x.nbytes, ranks * len(x) * shard_bytes(x.shape[1] // ranks))


def _round_meta(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((ranks, len(x), shard_bytes(x.shape[1] // ranks)), dtype=torch.uint8, device="meta")


@operation(_round_cost, meta=_round_meta)
def quantize_shards(x: Tensor, ranks: int) -> Tensor:
    """x [rows, width] as a part for each rank, uint8 [ranks, rows, bytes]. The ranks divide the width evenly.

    A value is off by no more than 2^-4 of itself or 2^-17 of the largest of its group, whichever is more: half a unit
    of e4m3. A group of which not all is finite stands for NaN.
    """
    return torch.stack([_packed(part) for part in x.chunk(ranks, 1)])


def _packed(x: Tensor) -> Tensor:
    rows, width = x.shape
    groups = ceil_div(width, GROUP)
    values, exponents = round_rows(F.pad(x, (0, groups * GROUP - width)).unflatten(1, (groups, GROUP)), _E4M3)
    found = x.new_zeros((rows, shard_bytes(width)), dtype=torch.uint8)
    found[:, :width] = values.flatten(1)[:, :width].view(torch.uint8)
    found[:, _filled(width) : _filled(width) + groups] = exponents
    return found


def _widened(packed: Tensor, width: int) -> Tensor:
    """Float32 [..., width]."""
    groups = ceil_div(width, GROUP)
    values = F.pad(packed[..., :width], (0, groups * GROUP - width)).view(_E4M3)
    exponents = packed[..., _filled(width) : _filled(width) + groups]
    return widen_rows(values.unflatten(-1, (groups, GROUP)), exponents, torch.float32).flatten(-2)[..., :width]


def _sum_cost(parts: Tensor, width: int, *, workload: Workload) -> Cost:
    elements = parts.shape[1] * width
    return Cost(elements * (2 * parts.shape[0] + 3), parts.nbytes, parts.nbytes // parts.shape[0])


def _sum_meta(parts: Tensor, width: int) -> Tensor:
    return parts.new_empty((1, *parts.shape[1:]), device="meta")


@operation(_sum_cost, meta=_sum_meta)
def sum_shards(parts: Tensor, width: int) -> Tensor:
    """The sum of parts of `width` columns over the ranks, as a part: [ranks, rows, bytes] to [1, rows, bytes], uint8.

    Added up in the order of the ranks, in float32, and rounded once, as `quantize_shards` does.
    """
    total = torch.zeros(parts.shape[1], width, device=parts.device)
    for part in parts:
        total = total + _widened(part, width)
    return _packed(total)[None]


def _widen_cost(parts: Tensor, width: int, dtype: torch.dtype, *, workload: Workload) -> Cost:
    elements = parts.shape[0] * parts.shape[1] * width
    return Cost(elements, parts.nbytes, elements * dtype.itemsize)


def _widen_meta(parts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return parts.new_empty((parts.shape[1], parts.shape[0] * width), dtype=dtype, device="meta")


@operation(_widen_cost, meta=_widen_meta)
def dequantize_shards(parts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What the parts of all ranks stand for, side by side: uint8 [ranks, rows, bytes] to [rows, ranks * width]."""
    return _widened(parts, width).to(dtype).transpose(0, 1).flatten(1)


@jit
def quantize_shards_kernel(
    x,
    values,
    exponents,
    sums,
    sum_exponents,
    x_row,
    width,
    groups,
    row_bytes,
    behind,
    RANKS: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Programs [rows, parts, groups / GROUPS]: rounds the parts of x, or the sum over RANKS of parts that are rounded.

    values, exponents: of what is given, if it is no x; sums, sum_exponents: of what is made. Both are the same memory,
    where exponents lie `behind` bytes on.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.program_id(2) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    held = column < width
    if x is not None:
        total = tl.load(x + row * x_row + part * width + column, mask=held, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([GROUPS, SIZE], tl.float32)
        for rank in tl.static_range(RANKS):
            total += _load_part(values, exponents, rank, row, group, column, held, groups, row_bytes, behind)
    scaled, powers = rounded_in_kernel(total, EXPONENT, MANTISSA, IS_INTEGER)
    start = (part * tl.num_programs(0).to(tl.int64) + row) * row_bytes
    tl.store(sums + start + column, scaled.to(sums.dtype.element_ty), mask=held)
    tl.store(sum_exponents + start + behind + group, powers.to(tl.uint8), mask=group < groups)


@jit
def _load_part(values, exponents, part, row, group, column, held, groups, row_bytes, behind):
    """What groups of a row of a part stand for, float32; the product is exact."""
    start = (part * tl.num_programs(0).to(tl.int64) + row) * row_bytes
    given = tl.load(values + start + column, mask=held, other=0.0).to(tl.float32)
    powers = tl.load(exponents + start + behind + group, mask=group < groups, other=1)
    return given * powers_of(powers)[:, None]


@jit
def dequantize_shards_kernel(
    values,
    exponents,
    result,
    result_row,
    width,
    groups,
    row_bytes,
    behind,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Programs [rows, parts, groups / GROUPS]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.program_id(2) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    held = column < width
    wide = _load_part(values, exponents, part, row, group, column, held, groups, row_bytes, behind)
    tl.store(result + row * result_row + part * width + column, wide.to(result.dtype.element_ty), mask=held)


def _launch(kernel: Any, args: tuple[Any, ...], rows: int, parts: int, width: int, **constants: Any) -> None:
    """args: the kernel's before those that the width of a part decides."""
    groups, size = ceil_div(width, GROUP), 8
    if rows:
        kernel[(rows, parts, ceil_div(groups, size))](
            *args, width, groups, shard_bytes(width), _filled(width), **constants, GROUPS=size, SIZE=GROUP, num_warps=4
        )


_ROUNDING = rounding_constants(_E4M3)


def _round(x: Tensor, ranks: int) -> Tensor:
    rows, width = len(x), x.shape[1] // ranks
    sent = torch.empty((ranks, rows, shard_bytes(width)), dtype=torch.uint8, device=x.device)
    args = (x, None, None, sent.view(_E4M3), sent, x.stride(0))
    _launch(quantize_shards_kernel, args, rows, ranks, width, RANKS=1, **_ROUNDING)
    return sent


def _sum(parts: Tensor, width: int) -> Tensor:
    ranks, rows, row_bytes = parts.shape
    total = torch.empty((1, rows, row_bytes), dtype=torch.uint8, device=parts.device)
    args = (None, parts.view(_E4M3), parts, total.view(_E4M3), total, None)
    _launch(quantize_shards_kernel, args, rows, 1, width, RANKS=ranks, **_ROUNDING)
    return total


def _widen(parts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    ranks, rows, _ = parts.shape
    result = torch.empty((rows, ranks * width), dtype=dtype, device=parts.device)
    _launch(dequantize_shards_kernel, (parts.view(_E4M3), parts, result, ranks * width), rows, ranks, width)
    return result


def _fits(x: Tensor, *others: object) -> bool:
    return DeviceLimits.of(x.device).capability >= E4M3_CAPABILITY and x.dtype != torch.float64 and x.stride(-1) == 1


for _operation, _kernel, _run in (
    (quantize_shards, quantize_shards_kernel, _round),
    (sum_shards, quantize_shards_kernel, _sum),
    (dequantize_shards, dequantize_shards_kernel, _widen),
):
    _operation.in_triton(_run, invariant=True, supports=_fits, kernels=(_kernel,))
    _operation.by_definition("cpu", "cuda", invariant=True)
