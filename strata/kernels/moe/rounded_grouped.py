"""The grouped product in 8 bits: rows of activations that were rounded, by packed weights of the same kind of values.

Both operands reach the tensor cores as they are stored. Scales multiply the sums: those of rows at the end, those of
blocks of columns after each block, in float32 (DeepSeek-V3, 2412.19437, section 3.3.2). The tiles are those of
`grouped_product` for rows of as many bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.compile_case import CompileCase
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.grouped import NO_CLAMP, GroupedTile, expert_of_tile, gated_by, rows_of_tile
from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import HAS_TRITON, jit, tl

# Columns of a step, and the fewest that may share a scale.
_WIDTH = 128
# The first whose tensor cores multiply 8-bit floats.
_HOPPER = (9, 0)


@jit
def _load(tile, there, WHOLE_K: tl.constexpr):
    return tl.load(tile) if WHOLE_K else tl.load(tile, mask=there[None, :], other=0.0)


@jit
def _add(total, rows, matrix, x_scale, scale, GROUP: tl.constexpr, TURNED: tl.constexpr):
    """total plus the product of a step; with groups, times the scales of their rows and columns."""
    kind: tl.constexpr = tl.int32 if rows.dtype == tl.int8 else tl.float32
    sums = total if GROUP == 0 else tl.zeros(total.shape, kind)
    if TURNED:
        sums = tl.dot(matrix, tl.trans(rows), sums, out_dtype=kind)
    else:
        sums = tl.dot(rows, tl.trans(matrix), sums, out_dtype=kind)
    if GROUP > 0 and TURNED:
        sums = total + sums.to(tl.float32) * x_scale[None, :] * wide_scale(scale)[:, None]
    elif GROUP > 0:
        sums = total + sums.to(tl.float32) * x_scale[:, None] * wide_scale(scale)[None, :]
    return sums


@jit
def _ended(total, x_scales, scales, row_scales, bias, from_row, place, row, GROUP: tl.constexpr, TURNED: tl.constexpr):
    """Sums -> the product [BLOCK_M, BLOCK_N] in float32, with scales of rows and the bias."""
    total = total.to(tl.float32)
    if TURNED:
        total = tl.trans(total)
    if GROUP == 0:
        total *= tl.load(x_scales + from_row)[:, None] * wide_scale(tl.load(scales + place))[None, :]
    if row_scales is not None:
        total *= tl.load(row_scales + row)[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    return total


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count", "per_token"))
def rounded_grouped_kernel(
    x,
    values,
    x_scales,
    scales,
    row_scales,
    bias,
    ends,
    source,
    result,
    count,
    out,
    width,
    x_groups,
    scale_rows,
    groups,
    per_token,
    alpha,
    limit,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs as those of `grouped_kernel`; x and values, [experts, out, width] or twice as many rows, contiguous.

    x_scales [rows, x_groups] float32, scales [experts, scale_rows, groups]; GROUP: columns that share a scale, a
    multiple of BLOCK_K, or 0: all. row_scales, bias and source, of rows to fetch, may be None.
    """
    columns = tl.cdiv(out, BLOCK_N)
    tile = tl.program_id(0) // columns
    expert, starts, tiles, behind, stops = expert_of_tile(ends, tile, count, EXPERTS, BLOCK_M)
    if expert >= count:
        return
    first, end = rows_of_tile(expert, tile, starts, tiles, behind, stops, EXPERTS, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Clamped instead of masked: what lies beyond the edge is computed from the last row and never stored.
    from_row = tl.minimum(row, end - 1).to(tl.int64)
    if source is not None:
        from_row = tl.load(source + from_row) // per_token
    expert = tl.cast(expert, tl.int64)
    both = out * (2 if GATED else 1)
    own = tl.minimum(column, out - 1)
    opened = own + (out if GATED else 0)  # behind the rows of the gate
    x_tile = x + from_row[:, None] * width + k[None, :]
    values += expert * both * width
    value_tile = values + opened.to(tl.int64)[:, None] * width + k[None, :]
    gate_tile = values + own.to(tl.int64)[:, None] * width + k[None, :]
    scales += expert * scale_rows * groups
    place = (opened // ROW_GROUP if ROW_GROUP > 0 else opened * 0) * groups
    gate_place = (own // ROW_GROUP if ROW_GROUP > 0 else own * 0) * groups
    from_row *= x_groups
    if row_scales is not None:
        row_scales += expert * both
    if bias is not None:
        bias += expert * both
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 and GROUP == 0 else tl.float32
    total = tl.zeros((BLOCK_N, BLOCK_M), kind) if TURNED else tl.zeros((BLOCK_M, BLOCK_N), kind)
    gate = total
    x_scale, scale, gate_scale = 0.0, 0.0, 0.0
    if GROUP > 0:
        x_scale = tl.load(x_scales + from_row)
        scale = tl.load(scales + place)
        gate_scale = tl.load(scales + gate_place)
    for at in range(0, width, BLOCK_K):
        there = k < width - at
        rows = _load(x_tile, there, WHOLE_K)
        total = _add(total, rows, _load(value_tile, there, WHOLE_K), x_scale, scale, GROUP, TURNED)
        if GATED:
            gate = _add(gate, rows, _load(gate_tile, there, WHOLE_K), x_scale, gate_scale, GROUP, TURNED)
        if GROUP > 0:
            # Asked for a turn before they are wanted.
            group = tl.minimum((at + BLOCK_K) // GROUP, groups - 1)
            x_scale = tl.load(x_scales + from_row + group)
            scale = tl.load(scales + place + group)
            if GATED:
                gate_scale = tl.load(scales + gate_place + group)
        x_tile += BLOCK_K
        value_tile += BLOCK_K
        gate_tile += BLOCK_K
    total = _ended(total, x_scales, scales, row_scales, bias, from_row, place, opened, GROUP, TURNED)
    if GATED:
        gate = _ended(gate, x_scales, scales, row_scales, bias, from_row, gate_place, own, GROUP, TURNED)
        total = gated_by(total, gate, alpha, limit, CLAMPED)
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < out)[None, :])


def choose_tile(rows: int, count: int, grouped: bool, *, gated: bool, shared_bytes: int = SHARED_BYTES) -> GroupedTile:
    """For that many rows of that many experts. grouped: whether blocks of columns have scales of their own, of which
    no step has two."""
    each, wide = rows / count, _WIDTH if grouped else 2 * _WIDTH
    if each <= 12:
        tile = GroupedTile(16, 64, wide, 4, 6 if grouped else 3, turned=True)
    elif each <= 28:
        tile = GroupedTile(32, 64, _WIDTH if gated else wide, 4, 5 if gated else 3, turned=True)
    elif grouped:  # sums over blocks take registers of their own
        tile = GroupedTile(64, 64, _WIDTH, 4, 4, turned=True)
        if each > 48 or not gated:
            tile = GroupedTile(64, 128, _WIDTH, 8, 4, turned=True)
    elif each <= 48:
        tile = GroupedTile(64, 64, _WIDTH, 4, 4) if gated else GroupedTile(64, 128, _WIDTH, 4, 3)
    else:
        tile = GroupedTile(128, 128, _WIDTH, 8, 4) if gated else GroupedTile(128, 256, _WIDTH, 8, 4)
    stage = (tile.rows + tile.columns * (2 if gated else 1)) * tile.width
    return tile._replace(stages=max(1, min(tile.stages, shared_bytes // stage)))


def rounded_takes(dtype: torch.dtype, weight: PackedWeight) -> bool:
    """Whether rows of that type, rounded as a weight's scheme says, are multiplied by it, of all experts."""
    group, kind = weight.columns, weight.activations
    whole = kind == "row" and group == 0
    blocks = kind == "block" and group >= _WIDTH and group & (group - 1) == 0
    tensors = [weight.values, weight.scales, *([] if weight.row_scales is None else [weight.row_scales])]
    return (
        HAS_TRITON
        and weight.kind in ("e4m3", "int8")
        and (whole or blocks)
        and weight.zeros is None
        and dtype in (torch.bfloat16, torch.float16)
        and weight.shape[-1] % 16 == 0
        and all(one.is_contiguous() for one in tensors)
        and DeviceLimits.of(weight.device).capability >= _HOPPER
    )


def rounded_grouped_product(
    x: Tensor,
    x_scales: Tensor,
    weight: PackedWeight,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    source: Tensor | None = None,
    per_token: int = 1,
    gated: bool = False,
    bias: Tensor | None = None,
    clamp: Clamp | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:
    """`grouped_product` of rows that `round_rows` made, values and scales, by a packed weight [experts, out, width]
    that is taken (`rounded_takes`), rounded to `dtype`. tile: None for that of the rule."""
    rows, (count, out, width) = len(x if source is None else source), weight.shape
    out = out // 2 if gated else out
    result = torch.empty((rows, out), dtype=dtype, device=x.device)
    if result.numel():
        shared = DeviceLimits.of(x.device).shared_bytes
        tile = tile or choose_tile(rows, count, weight.columns > 0, gated=gated, shared_bytes=shared)
        alpha, limit = clamp or NO_CLAMP
        tiles = min(count, rows) + rows // tile.rows
        rounded_grouped_kernel[(tiles * ceil_div(out, tile.columns),)](
            x,
            weight.values,
            x_scales,
            weight.scales,
            weight.row_scales,
            bias,
            ends,
            source,
            result,
            count,
            out,
            width,
            x_scales.shape[1],
            weight.scales.shape[1],
            weight.scales.shape[2],
            per_token,
            float(alpha),
            float(limit),
            ROW_GROUP=weight.rows,
            GROUP=weight.columns,
            **_constants(tile, count, width),
            GATED=gated,
            CLAMPED=clamp is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return result


def _constants(tile: GroupedTile, count: int, width: int) -> dict[str, Any]:
    return {
        "EXPERTS": max(128, next_power_of_2(count)),
        "WHOLE_K": width % tile.width == 0,
        "TURNED": tile.turned,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
    }


def compile_cases() -> list[CompileCase]:
    signature = {"x_scales": "*fp32:16", "scales": "*fp32:16", "ends": "*i32:16", "source": "*i64:16"}
    signature |= dict.fromkeys(("out", "width", "scale_rows"), "i32:16") | dict.fromkeys(("alpha", "limit"), "fp32")
    signature |= {"result": "*bf16:16"} | dict.fromkeys(("count", "per_token"), "i32")
    cases = []
    for kind, group, each, product in (
        ("fp8e4nv", 0, 4, "f32.e4m3.e4m3"),
        ("i8", 0, 200, "s32.s8.s8"),
        ("fp8e4nv", 128, 200, "f32.e4m3.e4m3"),
    ):
        tile = choose_tile(each * 128, 128, group > 0, gated=True)
        given = signature | dict.fromkeys(("x", "values"), f"*{kind}:16")
        given |= dict.fromkeys(("x_groups", "groups"), "i32:16") if group else {}
        constants: dict[str, object] = {"ROW_GROUP": 128 if group else 1, "GROUP": group, "GATED": True}
        constants |= _constants(tile, 128, 2048) | {"CLAMPED": False} | dict.fromkeys(("row_scales", "bias"))
        constants |= {} if group else dict.fromkeys(("x_groups", "groups"), 1)
        title = f"grouped product in {kind} by {group or 'rows'}, {each} rows an expert"
        must = ("wgmma.mma_async", product, "cp.async.cg.shared.global")
        cases.append(CompileCase(title, rounded_grouped_kernel, given, constants, tile.warps, tile.stages, must))
    return cases
