"""The Triton kernels of one product over all experts of a mixture: of floats or both operands in 8 bits, and of packed
weights whose values become floats in registers.

Operands in 8 bits reach the tensor cores as they are stored. Scales multiply the sums: those of rows at the end, those
of blocks of columns after each block, in float32 (DeepSeek-V3, 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from functools import partial

from strata.kernels.linear.quantized.small_m_kernels import halves_of_x
from strata.kernels.quant.dequantize import twice, unpack_bytes, unpack_halves, unpack_scaled, wide_scale
from strata.kernels.triton_import import jit, tl


@jit
def expert_of_tile(ends, tile, count, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which expert a tile of BLOCK_M rows is of, `count` if of none, and what `rows_of_tile` is to be told."""
    number = tl.arange(0, EXPERTS)
    known = number < count
    starts = tl.load(ends + number - 1, mask=known & (number > 0), other=0)
    stops = tl.load(ends + number, mask=known, other=0)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(tl.where(known, tiles, 0), 0)
    return tl.sum((behind <= tile).to(tl.int32), 0), starts, tiles, behind, stops


@jit
def rows_of_tile(expert, tile, starts, tiles, behind, stops, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first row of a tile, and where those of its expert end."""
    mine = tl.arange(0, EXPERTS) == expert
    first = tl.sum(tl.where(mine, starts + (tile - behind + tiles) * BLOCK_M, 0), 0)
    return first, tl.sum(tl.where(mine, stops, 0), 0)


@jit
def gated_by(total, gate, alpha, limit, CLAMPED: tl.constexpr):
    """What a gate leaves of what it opens; CLAMPED: as `clamped_swiglu`."""
    if CLAMPED:
        # By comparisons, which let NaN through.
        gate = tl.where(gate > limit, limit, gate)
        total = tl.where(total > limit, limit, tl.where(total < -limit, -limit, total))
        total = (total + 1) * gate / (1 + tl.exp(-alpha * gate))
    else:
        total *= gate / (1 + tl.exp(-gate))
    return total


@jit
def _load(tile, there, WHOLE_K: tl.constexpr):
    return tl.load(tile) if WHOLE_K else tl.load(tile, mask=there[None, :], other=0.0)


@jit
def _add(total, rows, matrix, x_scale, scale, GROUP: tl.constexpr, TURNED: tl.constexpr):
    """total plus the product of a step; with groups, times the scales of their rows and columns."""
    kind: tl.constexpr = tl.int32 if rows.dtype == tl.int8 else tl.float32
    sums = total if GROUP == 0 else tl.zeros(total.shape, kind)
    if TURNED:
        sums = tl.dot(matrix, tl.trans(rows), sums, input_precision="ieee", out_dtype=kind)
    else:
        sums = tl.dot(rows, tl.trans(matrix), sums, input_precision="ieee", out_dtype=kind)
    if GROUP > 0 and TURNED:
        sums = total + sums.to(tl.float32) * x_scale[None, :] * wide_scale(scale)[:, None]
    elif GROUP > 0:
        sums = total + sums.to(tl.float32) * x_scale[:, None] * wide_scale(scale)[None, :]
    return sums


@jit
def _ended(
    total, x_scales, scales, row_scales, bias, from_row, place, row, held, GROUP: tl.constexpr, TURNED: tl.constexpr
):
    """Sums -> the product [BLOCK_M, BLOCK_N] in float32, with scales of rows and the bias."""
    total = total.to(tl.float32)
    if TURNED:
        total = tl.trans(total)
    if GROUP == 0 and scales is not None:
        total *= tl.load(x_scales + from_row)[:, None] * wide_scale(tl.load(scales + place))[None, :]
    if row_scales is not None:
        total *= tl.load(row_scales + row)[None, :]
    if bias is not None:
        # Masked where rows are not clamped, so that neighbours are read together.
        own = tl.load(bias + row, mask=held, other=0.0) if scales is None else tl.load(bias + row)
        total += own.to(tl.float32)[None, :]
    return total


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count", "per_token"))
def grouped_kernel(
    x,
    values,
    scales,
    x_scales,
    row_scales,
    bias,
    ends,
    source,
    result,
    count,
    out,
    width,
    x_stride,
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
    """Programs [as many tiles as there can be * out / BLOCK_N]: a tile of rows of one expert each, all columns of a
    tile side by side, which so find its rows in the cache.

    values: [experts, out, width], contiguous. EXPERTS: a power of two, at least `count`. source: row r is that of token
    source[r] // per_token, or None. GATED: a weight has as many rows for the gate before its own; CLAMPED: within the
    bounds of `clamped_swiglu`. TURNED: the weight is the left operand, of which tensor cores take at least 64 rows, and
    so a tile may have fewer rows of x. Of 8 bits x_scales [rows, x_groups] float32, scales [experts, scale_rows,
    groups]; GROUP: columns that share a scale, a multiple of BLOCK_K, or 0: all; ROW_GROUP: rows of the weight, 0: all.
    row_scales, bias: or None.
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
    x_tile = x + from_row[:, None] * (width if x_stride is None else x_stride) + k[None, :]
    values += expert * both * width
    value_tile = values + opened.to(tl.int64)[:, None] * width + k[None, :]
    gate_tile = values + own.to(tl.int64)[:, None] * width + k[None, :]
    if GATED and scales is None:  # fewer instructions, with which the largest tile in 8 bits would spill
        value_tile = gate_tile + tl.cast(out, tl.int64) * width
    place, gate_place = opened, own
    if scales is None:
        own, opened = column, column + (out if GATED else 0)
    else:
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
    total = _ended(total, x_scales, scales, row_scales, bias, from_row, place, opened, column < out, GROUP, TURNED)
    if GATED:
        gate = _ended(gate, x_scales, scales, row_scales, bias, from_row, gate_place, own, column < out, GROUP, TURNED)
        total = gated_by(total, gate, alpha, limit, CLAMPED)
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < out)[None, :])


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
    """What the sums of a turn need: scales and zeros of their group [BLOCK_N], of rows that begin at `place`, as they
    are stored; numbers for what they do not."""
    scale, zero = 0.0, 0.0
    if SCALED_SUMS:
        scale = tl.load(scales + place + tl.minimum(group, groups - 1))
    if zeros is not None:
        zero = tl.load(zeros + place + tl.minimum(group, groups - 1))
    return scale, zero


@jit
def _add_turn(
    total,
    tile,
    place,
    scale,
    zero,
    both,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    CENTERED: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """total plus the product of the values at a tile, [BLOCK_N, bytes], and x. both: what a gate and what it opens have
    in common, of x its columns twice, or the even ones and the odd ones."""
    there, scales, group, groups, left, right = both
    GROUPS: tl.constexpr = (2 * left.shape[0] + GROUP - 1) // GROUP if KIND == "e2m1" and GROUP > 0 else 0
    SCALED_SUMS: tl.constexpr = KIND != "e2m1" and GROUP > 0
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
def _quantized_ended(total, scales, row_scales, bias, place, row, held, GROUP: tl.constexpr):
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
def quantized_grouped_kernel(
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
    matrix_rows = out * (2 if GATED else 1)
    k = tl.arange(0, BLOCK_K // PAIR)
    x_start = x + from_row * x_stride
    if HALVES:
        x_start = x_start.to(tl.pointer_type(tl.uint64 if kind == tl.float32 else tl.uint32))
    x_tile = x_start[None, :] + k[:, None]
    values += expert * matrix_rows * value_stride
    scales += expert * scale_rows * groups
    if zeros is not None:
        zeros += expert * scale_rows * groups
    if row_scales is not None:
        row_scales += expert * matrix_rows
    if bias is not None:
        bias += expert * matrix_rows
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
            both = (there, scales, start // GROUP if GROUP > 0 else 0, groups, left, right)
            total = _add_turn(total, value_tile, place, scale, zero, both, KIND, GROUP, CENTERED, WHOLE_K)
            value_tile += BLOCK_K // PAIR
            if GATED:
                gate = _add_turn(
                    gate, gate_tile, gate_place, gate_scale, gate_zero, both, KIND, GROUP, CENTERED, WHOLE_K
                )
                gate_tile += BLOCK_K // PAIR
            x_tile += BLOCK_K // PAIR
            if SCALED_SUMS:
                # Asked for a turn before they are wanted.
                after = (start + BLOCK_K) // GROUP
                scale, zero = _scales_at(scales, zeros, place, after, groups, SCALED_SUMS)
                if GATED:
                    gate_scale, gate_zero = _scales_at(scales, zeros, gate_place, after, groups, SCALED_SUMS)
    total = _quantized_ended(total, scales, row_scales, bias, place, opened, held, GROUP)
    if GATED:
        gate = _quantized_ended(gate, scales, row_scales, bias, gate_place, own, held, GROUP)
        total = gated_by(total, gate, alpha, limit, CLAMPED)
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & held[None, :])
