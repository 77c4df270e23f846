"""The Triton kernel of grouped products with packed weights, whose values become floats in registers."""

from __future__ import annotations

from functools import partial

from strata.kernels.compile_case import CompileCase
from strata.kernels.linear.packed.few_rows_kernels import halves_of_x
from strata.kernels.moe.grouped import expert_of_tile, gated_by, rows_of_tile
from strata.kernels.quant.dequantize import twice, unpack_bytes, unpack_halves, unpack_scaled, wide_scale
from strata.kernels.triton_import import jit, tl


@jit
def _scale_at(scales, place, group, groups):
    """Scales (or zeros) of a group, of rows that begin at `place`, as they are stored: [BLOCK_N]."""
    return tl.load(scales + place + tl.minimum(group, groups - 1))


@jit
def _of_bytes(scales, place, group, groups, BYTES: tl.constexpr, GROUPS: tl.constexpr, kind: tl.constexpr):
    """The scale of each byte [BLOCK_N, BYTES] of GROUPS groups from `group` on, for `unpack_scaled`.

    Nothing here but what compilers move before the load, so that each thread loads scales of its own values.
    """
    number = tl.minimum(group + tl.arange(0, GROUPS), groups - 1)
    scale = tl.load(scales + place[:, None] + number[None, :])
    scale = twice(scale) if kind == tl.bfloat16 else wide_scale(scale)
    spread = tl.broadcast_to(tl.expand_dims(scale, 2), (place.shape[0], GROUPS, BYTES // GROUPS))
    return tl.reshape(spread, (place.shape[0], BYTES))


@jit
def _scales_at(scales, zeros, place, group, groups, SCALED_SUMS: tl.constexpr):
    """What the sums of a turn need: scales and zeros of their group, numbers for what they do not."""
    scale, zero = 0.0, 0.0
    if SCALED_SUMS:
        scale = _scale_at(scales, place, group, groups)
    if zeros is not None:
        zero = _scale_at(zeros, place, group, groups)
    return scale, zero


@jit
def _add_turn(
    total,
    tile,
    there,
    scales,
    place,
    group,
    groups,
    scale,
    zero,
    left,
    right,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED_SUMS: tl.constexpr,
    CENTERED: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """total plus the product of the values at a tile, [BLOCK_N, bytes], and x: `left` its columns, or the even ones and
    `right` the odd ones. GROUPS: of four-bit floats how many share the turn, 0: they have no scales in it."""
    kind: tl.constexpr = left.dtype
    if WHOLE_K:
        packed = tl.load(tile, eviction_policy="evict_first")
    else:
        packed = tl.load(tile, mask=there[None, :], other=0.0, eviction_policy="evict_first")
    sums = tl.zeros_like(total) if SCALED_SUMS else total
    if KIND == "int4" or KIND == "e2m1":
        if GROUPS > 0:
            low, high = unpack_scaled(packed, _of_bytes(scales, place, group, groups, packed.shape[1], GROUPS, kind))
        else:
            low, high = unpack_halves(packed, KIND, CENTERED, kind)
        if not CENTERED:
            low = low - zero.to(kind)[:, None]
            high = high - zero.to(kind)[:, None]
        sums = tl.dot(low, left, sums, input_precision="ieee")
        sums = tl.dot(high, right, sums, input_precision="ieee")
    else:
        sums = tl.dot(unpack_bytes(packed, KIND, kind), left, sums, input_precision="ieee")
    return total + sums * wide_scale(scale)[:, None] if SCALED_SUMS else sums


@jit
def _ended(total, scales, row_scales, bias, place, row, held, GROUP: tl.constexpr):
    """Sums [BLOCK_N, BLOCK_M] -> the product [BLOCK_M, BLOCK_N], with what their rows of the weight are multiplied by,
    and the bias."""
    if GROUP == 0:
        total *= wide_scale(tl.load(scales + place))[:, None]
    if row_scales is not None:
        total *= tl.load(row_scales + row)[:, None]
    total = tl.trans(total)
    if bias is not None:
        total += tl.load(bias + row, mask=held, other=0.0).to(tl.float32)[None, :]
    return total


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count", "per_token"))
def packed_grouped_kernel(
    x,
    values,
    scales,
    zeros,
    row_scales,
    bias,
    ends,
    source,
    result,
    count,
    out,
    width,
    x_stride,
    value_stride,
    scale_rows,
    groups,
    per_token,
    alpha,
    limit,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs as those of `grouped_kernel`; the weight is always the left operand, which passes through registers.

    values [experts, out, value_stride] (of a gate and what it opens 2 * out), scales and zeros [experts, scale_rows,
    groups], row_scales [experts, out]; zeros, row_scales, bias and source, of rows to fetch, may be None. ROW_GROUP,
    GROUP: rows and columns that share a scale, 0: all; GROUP is a multiple of BLOCK_K, but of four-bit floats, where
    either is one of the other. STEPS: blocks of a turn of the loop, whose loads are under way together.
    """
    kind: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    PAIR: tl.constexpr = 2 if HALVES else 1
    CENTERED: tl.constexpr = zeros is None
    GROUPS: tl.constexpr = (BLOCK_K + GROUP - 1) // GROUP if KIND == "e2m1" and GROUP > 0 else 0
    SCALED_SUMS: tl.constexpr = KIND != "e2m1" and GROUP > 0
    columns = tl.cdiv(out, BLOCK_N)
    tile = tl.program_id(0) // columns
    expert, starts, tiles, behind, stops = expert_of_tile(ends, tile, count, EXPERTS, BLOCK_M)
    if expert >= count:
        return
    first, end = rows_of_tile(expert, tile, starts, tiles, behind, stops, EXPERTS, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    held = column < out
    # Clamped instead of masked: what lies beyond the edge is computed from the last row and never stored.
    own = tl.minimum(column, out - 1)
    from_row = tl.minimum(row, end - 1).to(tl.int64)
    if source is not None:
        from_row = tl.load(source + from_row) // per_token
    expert = tl.cast(expert, tl.int64)
    both = out * (2 if GATED else 1)
    k = tl.arange(0, BLOCK_K // PAIR)
    x_start = x + from_row * x_stride
    if HALVES:
        x_start = x_start.to(tl.pointer_type(tl.uint64 if kind == tl.float32 else tl.uint32))
    x_tile = x_start[None, :] + k[:, None]
    values += expert * both * value_stride
    scales += expert * scale_rows * groups
    if zeros is not None:
        zeros += expert * scale_rows * groups
    if row_scales is not None:
        row_scales += expert * both
    if bias is not None:
        bias += expert * both
    # Of what is opened the rows stand behind those of the gate.
    opened = own + (out if GATED else 0)
    place = (opened // ROW_GROUP if ROW_GROUP > 0 else opened * 0) * groups
    gate_place = (own // ROW_GROUP if ROW_GROUP > 0 else own * 0) * groups
    value_tile = values + opened.to(tl.int64)[:, None] * value_stride + k[None, :]
    gate_tile = values + own.to(tl.int64)[:, None] * value_stride + k[None, :]
    scale, zero = _scales_at(scales, zeros, place, 0, groups, SCALED_SUMS)
    gate_scale, gate_zero = _scales_at(scales, zeros, gate_place, 0, groups, SCALED_SUMS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gate = total
    for turn in tl.range(0, width, STEPS * BLOCK_K, num_stages=STAGES):
        for step in tl.static_range(STEPS):
            start = turn + step * BLOCK_K
            there = k < value_stride - start // PAIR
            if HALVES:
                left, right = halves_of_x(x_tile, there[:, None], WHOLE_K, kind)
            else:
                left = tl.load(x_tile) if WHOLE_K else tl.load(x_tile, mask=there[:, None], other=0.0)
                right = left
            group = start // GROUP if GROUP > 0 else 0
            total = _add_turn(
                total,
                value_tile,
                there,
                scales,
                place,
                group,
                groups,
                scale,
                zero,
                left,
                right,
                KIND,
                GROUPS,
                SCALED_SUMS,
                CENTERED,
                WHOLE_K,
            )
            value_tile += BLOCK_K // PAIR
            if GATED:
                gate = _add_turn(
                    gate,
                    gate_tile,
                    there,
                    scales,
                    gate_place,
                    group,
                    groups,
                    gate_scale,
                    gate_zero,
                    left,
                    right,
                    KIND,
                    GROUPS,
                    SCALED_SUMS,
                    CENTERED,
                    WHOLE_K,
                )
                gate_tile += BLOCK_K // PAIR
            x_tile += BLOCK_K // PAIR
            if SCALED_SUMS:
                # Asked for a turn before they are wanted.
                after = (start + BLOCK_K) // GROUP
                scale, zero = _scales_at(scales, zeros, place, after, groups, SCALED_SUMS)
                if GATED:
                    gate_scale, gate_zero = _scales_at(scales, zeros, gate_place, after, groups, SCALED_SUMS)
    total = _ended(total, scales, row_scales, bias, place, opened, held, GROUP)
    if GATED:
        gate = _ended(gate, scales, row_scales, bias, gate_place, own, held, GROUP)
        total = gated_by(total, gate, alpha, limit, CLAMPED)
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & held[None, :])


def compile_cases() -> list[CompileCase]:
    """Of few rows: bytes by rows; four-bit floats with biases, of a width that no step divides; integers with zeros.
    Of many: blocks."""
    signature = dict.fromkeys(("x", "result"), "*bf16:16") | {"ends": "*i32:16", "source": "*i64:16"}
    signature |= dict.fromkeys(("out", "width", "x_stride", "value_stride", "scale_rows"), "i32:16")
    signature |= dict.fromkeys(("count", "per_token"), "i32") | dict.fromkeys(("alpha", "limit"), "fp32")
    cases = []
    for kind, stored, scales, group, (rows, columns, width, warps), more, must in (
        ("e4m3", "fp8e4nv", "fp32", 0, (16, 64, 128, 2), {}, ("mma.sync", "ld.shared.v4.b32")),
        ("e2m1", "u8", "u8", 32, (32, 64, 64, 2), {"bias": "*bf16:16"}, ("mma.sync",)),
        ("int4", "u8", "fp32", 128, (16, 64, 64, 2), {"zeros": "*u8:16"}, ("mma.sync", "lop3.b32")),
        ("e4m3", "fp8e4nv", "fp32", 128, (64, 128, 64, 8), {}, ("wgmma.mma_async",)),
    ):
        given = signature | {"values": f"*{stored}:16", "scales": f"*{scales}:16"} | more
        given |= {"groups": "i32"} if group else {}
        constants: dict[str, object] = {"KIND": kind, "ROW_GROUP": 128 if rows == 64 else 1, "GROUP": group}
        constants |= {"EXPERTS": 128, "GATED": True, "CLAMPED": kind == "e2m1", "WHOLE_K": kind != "e2m1"}
        constants |= {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": width, "STAGES": 3}
        constants |= {"STEPS": 4 if kind in ("int4", "e2m1") else 1}
        constants |= {name: None for name in ("zeros", "row_scales", "bias") if name not in more}
        constants |= {} if group else {"groups": 1}
        title = f"packed grouped product {kind} by {group or 'rows'}, {rows}x{columns}"
        must = (*must, "cp.async.cg.shared.global")
        cases.append(CompileCase(title, packed_grouped_kernel, given, constants, warps, 3, must))
    return cases
