"""The Triton kernels of products of few rows with packed weights: `packed_gemv_kernel` and `packed_dot_kernel`.

They are those of `skinny_kernels` with other weights, and end alike, in `store_product`. Rows of x are not rounded: a
weight is converted in registers to x's type, in which its values are exact, and scales multiply sums, those of groups
of columns the sum over each group. Four-bit floats are multiplied by their scales themselves: both have so few bits
that bfloat16 holds the product.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.compile_case import CompileCase
from strata.kernels.linear.skinny_kernels import load_residual, load_squares, store_product, weight_rows
from strata.kernels.quant.dequantize import unpack_bytes, unpack_halves, unpack_wide, wide_scale
from strata.kernels.quant.expand import eight_columns
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def prefetch_bytes(start, PIECES: tl.constexpr):
    """Bring PIECES times 256 bytes from each pointer to bytes of start [BLOCK_N] into the L2 cache."""
    piece = start[:, None] + tl.arange(0, PIECES)[None, :] * 256
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l",
        [piece.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def scale_of_rows(scales, row_scales, weight_row, scale_stride, ROW_GROUP: tl.constexpr, GROUP: tl.constexpr):
    """What the sums of rows of the weight [BLOCK_N] are multiplied by at their end, float32; or None."""
    scale = None
    if GROUP == 0:
        group = weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0
        scale = wide_scale(tl.load(scales + group.to(tl.int64) * scale_stride))
    if row_scales is not None:
        own = tl.load(row_scales + weight_row)
        scale = own if GROUP > 0 else scale * own
    return scale


@jit
def _add_rows(total, wide, x, k, held, rows, x_stride, ROWS: tl.constexpr):
    """total [columns, ROWS] plus the sums of wide [columns, k] times each row of x at k."""
    row = tl.arange(0, ROWS)[None, :]
    for index in tl.static_range(ROWS):
        left = tl.load(x + tl.minimum(index, rows - 1) * x_stride + k, mask=held, other=0.0).to(tl.float32)
        total = tl.where(row == index, total + tl.sum(wide * left[None, :], 1)[:, None], total)
    return total


@partial(jit, unspecialized=("rows",))
def packed_gemv_kernel(
    x,
    values,
    scales,
    row_scales,
    bias,
    row_squares,
    residual,
    norm_weight,
    result,
    weighted,
    squares,
    rows,
    out,
    width,
    x_stride,
    value_stride,
    scale_stride,
    residual_stride,
    blocks,
    eps,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Of values in a byte each, with scales of rows: programs [tiles of columns], as in `gemv_kernel`."""
    weight_row, column = weight_rows(tl.program_id(0), out, BLOCK_N, GATED)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    held = k < width
    tile = values + weight_row.to(tl.int64)[:, None] * value_stride + k[None, :]
    if ONCE:
        held_values = tl.load(tile, mask=held[None, :], other=0.0, eviction_policy="evict_first")
    else:
        held_values = tl.load(tile, eviction_policy="evict_first")
    scale = scale_of_rows(scales, row_scales, weight_row, scale_stride, ROW_GROUP, 0)
    if bias is not None:
        bias = tl.load(bias + weight_row)
    if norm_weight is not None:
        norm_weight = tl.load(norm_weight + column, mask=column < out, other=0.0)
    if EARLY:
        # What precedes the wait may read what the step does not write: the model's parameters.
        gdc_wait()
        gdc_launch_dependents()
    if row_squares is not None:
        row_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
    if residual is not None:
        residual = load_residual(residual, residual_stride, row, column, rows, out)
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    last = 0
    if not ONCE:
        for start in range(BLOCK_K, width, BLOCK_K):
            # Asked for before the products of the tile before it are made.
            following = tl.load(tile + start, eviction_policy="evict_first")
            wide = unpack_wide(held_values, KIND, x.dtype.element_ty == tl.bfloat16)
            total = _add_rows(total, wide, x + last, k, held, rows, x_stride, ROWS)
            held_values = following
            last = start
    total = _add_rows(
        total,
        unpack_wide(held_values, KIND, x.dtype.element_ty == tl.bfloat16),
        x + last,
        k,
        held,
        rows,
        x_stride,
        ROWS,
    )
    store_product(
        total * scale[:, None],
        bias,
        row_squares,
        width,
        eps,
        residual,
        norm_weight,
        result,
        weighted,
        squares,
        row,
        column,
        rows,
        out,
        GATED,
    )


@jit
def _scales_of_bytes(start, BLOCK_N: tl.constexpr, BYTES: tl.constexpr, EACH: tl.constexpr, kind: tl.constexpr):
    """Scales of groups of EACH bytes from pointers start [BLOCK_N] on, for each of BYTES: [BLOCK_N, BYTES]."""
    groups: tl.constexpr = BYTES // EACH
    one = wide_scale(tl.load(start[:, None] + tl.arange(0, groups)[None, :])).to(kind)
    spread = tl.broadcast_to(one[:, :, None], (BLOCK_N, groups, EACH))
    return tl.reshape(spread, (BLOCK_N, BYTES))


@jit
def halves_of_x(tile, held, FULL: tl.constexpr, kind: tl.constexpr):
    """Elements of even and of odd columns, from pointers to pairs of them."""
    pair = tl.load(tile) if FULL else tl.load(tile, mask=held, other=0)
    if kind == tl.float32:
        even = (pair & 0xFFFFFFFF).to(tl.uint32).to(kind, bitcast=True)
        odd = (pair >> 32).to(tl.uint32).to(kind, bitcast=True)
    else:
        even = (pair & 0xFFFF).to(tl.uint16).to(kind, bitcast=True)
        odd = (pair >> 16).to(tl.uint16).to(kind, bitcast=True)
    return even, odd


@jit
def _four_dots(a, b, c, d, tile, held, total, FULL: tl.constexpr, kind: tl.constexpr):
    """total plus the products of four columns of a weight and of x, from pointers to four 16-bit floats of x."""
    four = tl.load(tile) if FULL else tl.load(tile, mask=held, other=0)
    total = tl.dot(a, (four & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    total = tl.dot(b, ((four >> 16) & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    total = tl.dot(c, ((four >> 32) & 0xFFFF).to(tl.uint16).to(kind, bitcast=True), total)
    return tl.dot(d, (four >> 48).to(tl.uint16).to(kind, bitcast=True), total)


@partial(jit, unspecialized=("rows",))
def packed_dot_kernel(
    x,
    values,
    scales,
    zeros,
    row_scales,
    bias,
    row_squares,
    residual,
    norm_weight,
    result,
    weighted,
    squares,
    parts,
    counters,
    rows,
    out,
    part,
    x_stride,
    value_stride,
    scale_stride,
    residual_stride,
    blocks,
    eps,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEPS: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Programs [tiles of columns, SPLITS, tiles of rows], as in `dot_kernel`; part: columns of a program.

    GROUP: columns that share a scale, 0: all; a multiple of BLOCK_K, but for e2m1, where either is one of the other.
    STEPS: blocks of a turn of the loop, whose loads are under way together.
    Of 2:4, `values` are int64 of four floats each, and `scales` their places.
    """
    kind: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    SPARSE: tl.constexpr = KIND == "2:4"
    PAIR: tl.constexpr = 8 if SPARSE else (2 if HALVES else 1)
    SCALED_VALUES: tl.constexpr = KIND == "e2m1" and GROUP > 0
    SCALED_SUMS: tl.constexpr = KIND != "e2m1" and GROUP > 0
    tile, split = tl.program_id(0), tl.program_id(1)
    weight_row, column = weight_rows(tile, out, BLOCK_N, GATED)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    value_start = values + weight_row.to(tl.int64) * value_stride + split * (part // PAIR)
    if PIECES > 0:
        prefetch_bytes(value_start, PIECES)
    if SPARSE:
        scale = None
        place_tile = (scales + weight_row.to(tl.int64) * scale_stride + split * (part // PAIR))[:, None]
    else:
        scale = scale_of_rows(scales, row_scales, weight_row, scale_stride, ROW_GROUP, GROUP)
    if GROUP > 0:
        group = weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0
        group_start = group.to(tl.int64) * scale_stride + split * part // GROUP
    if SCALED_SUMS:
        following = tl.load(scales + group_start)
        if zeros is not None:
            following_zero = tl.load(zeros + group_start)
    elif zeros is not None:
        zero = tl.load(zeros + (weight_row // ROW_GROUP if ROW_GROUP > 0 else weight_row * 0) * scale_stride)
    if bias is not None:
        bias = tl.load(bias + weight_row)
    if norm_weight is not None:
        norm_weight = tl.load(norm_weight + column, mask=column < out, other=0.0)
    if EARLY:
        # What precedes the wait may read what the step does not write: the model's parameters.
        gdc_wait()
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K // PAIR)
    value_tile = value_start[:, None] + k[None, :]
    x_start = x + row.to(tl.int64) * x_stride + split * part
    if HALVES:
        x_start = x_start.to(tl.pointer_type(tl.uint64 if kind == tl.float32 else tl.uint32))
    if SPARSE:
        x_start = x_start.to(tl.pointer_type(tl.uint64))
        place_tile = place_tile + k[None, :]
        x_tile = x_start[None, :] + 2 * k[:, None]
    else:
        x_tile = x_start[None, :] + k[:, None]
    held = (row < rows)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for turn in tl.range(0, part, STEPS * BLOCK_K, num_stages=STAGES):
        for step in tl.static_range(STEPS):
            start = turn + step * BLOCK_K
            if SCALED_SUMS:
                # Asked for a turn before they are wanted.
                group_scale = following
                after = tl.minimum(start + BLOCK_K, part - 1) // GROUP
                following = tl.load(scales + group_start + after)
                if zeros is not None:
                    zero = following_zero
                    following_zero = tl.load(zeros + group_start + after)
            packed = tl.load(value_tile, eviction_policy="evict_first")
            if SPARSE:
                places = tl.load(place_tile, eviction_policy="evict_first")
                a, b, c, d, e, f, g, h = eight_columns(packed, places, kind)
                total = _four_dots(a, b, c, d, x_tile, held, total, FULL, kind)
                total = _four_dots(e, f, g, h, x_tile + 1, held, total, FULL, kind)
                place_tile += BLOCK_K // PAIR
                x_tile += BLOCK_K // PAIR
            elif HALVES:
                low, high = unpack_halves(packed, KIND, zeros is None, kind)
                if zeros is not None:
                    low = low - zero.to(kind)[:, None]
                    high = high - zero.to(kind)[:, None]
                if SCALED_VALUES:
                    EACH: tl.constexpr = GROUP // 2 if GROUP < BLOCK_K else BLOCK_K // 2
                    spread = _scales_of_bytes(scales + group_start + start // GROUP, BLOCK_N, BLOCK_K // 2, EACH, kind)
                    low = low * spread
                    high = high * spread
                even, odd = halves_of_x(x_tile, held, FULL, kind)
                if SCALED_SUMS:
                    sums = tl.dot(high, odd, tl.dot(low, even))
                    total += sums * wide_scale(group_scale)[:, None]
                else:
                    total = tl.dot(high, odd, tl.dot(low, even, total))
            else:
                x_part = tl.load(x_tile) if FULL else tl.load(x_tile, mask=held, other=0.0)
                wide = unpack_bytes(packed, KIND, kind)
                if SCALED_SUMS:
                    total += tl.dot(wide, x_part) * wide_scale(group_scale)[:, None]
                else:
                    total = tl.dot(wide, x_part, total)
            value_tile += BLOCK_K // PAIR
            x_tile += BLOCK_K // PAIR
    last = True
    if SPLITS > 1:
        offset = tl.program_id(2) * tl.num_programs(0) + tile
        element = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        first = parts + offset.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + element
        tl.store(first + split * (BLOCK_N * BLOCK_M), total)
        tl.debug_barrier()  # all of a program's sums are there before it arrives
        last = tl.atomic_add(counters + offset, 1, sem="acq_rel") == SPLITS - 1
    if last:
        own_squares, own_residual = None, None
        if row_squares is not None:
            own_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
        if residual is not None:
            own_residual = load_residual(residual, residual_stride, row, column, rows, out)
        if SPLITS > 1:
            # Past the nearest cache, which knows nothing of other programs' writes.
            total = tl.load(first, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(first + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(counters + offset, 0)
        if scale is not None:
            total *= scale[:, None]
        store_product(
            total,
            bias,
            own_squares,
            part * SPLITS,
            eps,
            own_residual,
            norm_weight,
            result,
            weighted,
            squares,
            row,
            column,
            rows,
            out,
            GATED,
        )


def compile_cases() -> list[CompileCase]:
    """Values that stream into registers; halves of bytes for `mma.sync`; blocks of columns for `wgmma`."""
    signature = dict.fromkeys(("x", "result"), "*bf16:16") | {"scales": "*fp32:16", "rows": "i32"}
    signature |= dict.fromkeys(("out", "x_stride", "value_stride"), "i32:16") | {"scale_stride": "i32"}
    absent = "zeros row_scales bias row_squares residual norm_weight weighted squares residual_stride blocks eps"
    constants: dict[str, object] = dict.fromkeys(absent.split()) | {
        "ROW_GROUP": 1,
        "GATED": True,
        "EARLY": True,
        "BLOCKS": 1,
    }
    gemv = signature | {"values": "*fp8e4nv:16", "width": "i32:16"}
    sizes = {"KIND": "e4m3", "BLOCK_N": 4, "BLOCK_K": 2048, "ROWS": 2, "ONCE": False}
    one = {name: value for name, value in constants.items() if name != "zeros"}
    loads = ("ld.global.L1::evict_first", "v4.b32", "cvt.rn.f16x2.e4m3x2")
    cases = [CompileCase("packed gemv e4m3", packed_gemv_kernel, gemv, one | sizes, 8, 2, loads)]
    for kind, stored, group, rows, columns, block, warps, splits, must in (
        ("int4", "u8", 128, 8, 32, 128, 2, 4, ("mma.sync", "lop3.b32", "cp.async.cg.shared.global")),
        ("e4m3", "fp8e4nv", 128, 64, 64, 128, 4, 1, ("wgmma.mma_async", "cp.async.cg.shared.global")),
        ("2:4", "i64", 0, 8, 32, 128, 2, 4, ("mma.sync", "cp.async.cg.shared.global")),
        ("2:4", "i64", 0, 64, 64, 128, 4, 1, ("wgmma.mma_async",)),
    ):
        own = dict.fromkeys(("parts", "counters")) if splits == 1 else {}
        given = signature | {"values": f"*{stored}:16", "part": "i32:16"}
        given |= {} if own else {"parts": "*fp32:16", "counters": "*i32:16"}
        sizes = {"KIND": kind, "GROUP": group, "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": block, "SPLITS": splits}
        sizes |= {"STEPS": 2 if kind == "int4" else 1, "FULL": False, "STAGES": 4, "PIECES": 0 if kind == "2:4" else 1}
        given |= {"scales": "*u8:16", "scale_stride": "i32:16"} if kind == "2:4" else {}
        title = f"packed dot {kind} {rows}x{columns}"
        cases.append(CompileCase(title, packed_dot_kernel, given, constants | own | sizes, warps, 4, must))
    return cases
