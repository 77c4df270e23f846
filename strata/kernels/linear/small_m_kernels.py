"""The Triton kernels of products with few rows: `gemv_kernel` on the CUDA cores, `dot_kernel` on the tensor cores.

Both sum a tile [BLOCK_N, BLOCK_M] in float32, rows of the weight by rows of x, and both end in `store_product`, or in
`send_product` where ranks add the product up: inboxes [WORLD] int64 are the addresses of theirs, calls [rows] int32 the
counters of the receiver's programs, and rank the number of this one. The weight is in x's type (KIND "float") or packed
in values of a KIND, with scales and maybe zeros and row_scales as a `QuantizedWeight` has them; so many rows share
scales as ROW_GROUP says. Arguments that a product has no use for are None.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.collective.all_reduce import addresses
from strata.kernels.collective.gemm_all_reduce import epochs_of, send_product
from strata.kernels.linear.quantized.int4_gemv import dot_chunks, load_chunks
from strata.kernels.linear.quantized.small_m_kernels import four_dots, halves_of_x, scale_of_rows, scales_of_bytes
from strata.kernels.quant.dequantize import unpack_bytes, unpack_halves, unpack_wide, wide_scale
from strata.kernels.quant.expand import eight_columns
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def prefetch_weights(start, PIECES: tl.constexpr):
    """Bring PIECES times 256 bytes from each pointer of start [BLOCK_N] into the L2 cache."""
    EACH: tl.constexpr = 2048 // start.dtype.element_ty.primitive_bitwidth
    piece = start[:, None] + tl.arange(0, PIECES)[None, :] * EACH
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l",
        [piece.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def weight_rows(tile, out, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The rows of the weight [BLOCK_N] that a tile multiplies by, and the columns of the result that they make.

    They are the same, clamped instead of masked: what lies beyond the edge is computed from the last and never stored.
    With GATED, half of them are rows of the gate and half the rows of `up` for the same columns, `out` rows further.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    offset = tl.arange(0, BLOCK_N)
    row = tl.minimum(tile * COLUMNS + offset % COLUMNS, out - 1) + offset // COLUMNS * out
    return row, tile * COLUMNS + tl.arange(0, COLUMNS)


@jit
def load_squares(squares, row, rows, blocks, BLOCKS: tl.constexpr):
    """squares [rows, blocks] float32 of some rows -> [BLOCK_M, BLOCKS], zeros past the last block."""
    block = tl.arange(0, BLOCKS)[None, :]
    start = squares + tl.minimum(row, rows - 1)[:, None] * blocks
    return tl.load(start + block, mask=block < blocks, other=0.0)


@jit
def load_residual(residual, stride, row, column, rows, out):
    """residual [rows, out] at some rows and columns -> [BLOCK_N, BLOCK_M]."""
    held = (column < out)[:, None] & (row < rows)[None, :]
    return tl.load(residual + row.to(tl.int64)[None, :] * stride + column[:, None], mask=held, other=0.0)


@jit
def store_product(
    total, bias, row_squares, width, eps, residual, factor, results, row, column, rows, out, GATED: tl.constexpr
):
    """Turn a tile of sums into a tile of the result, and store it.

    bias, factor (the norm's weights): [BLOCK_N]; row_squares [BLOCK_M, BLOCKS] and residual [BLOCK_N, BLOCK_M] as
    loaded above. results: the result and, stored if there is a factor, weighted [rows, out] and squares [rows, tiles].
    """
    result, weighted, squares = results
    if row_squares is not None:
        total *= tl.rsqrt(tl.sum(row_squares, 1) / width + eps)[None, :]
    if bias is not None:
        total += bias.to(tl.float32)[:, None]
    if GATED:
        halves = tl.reshape(total, (2, total.shape[0] // 2, total.shape[1]))
        gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
        total = gate / (1 + tl.exp(-gate)) * up
    held = (column < out)[:, None] & (row < rows)[None, :]
    offset = row.to(tl.int64)[None, :] * out + column[:, None]
    kind: tl.constexpr = result.dtype.element_ty
    if residual is not None:
        total += residual.to(tl.float32)
    if factor is not None:
        # As rounded: the norm is of what is stored.
        total = tl.where(held, total.to(kind).to(tl.float32), 0.0)
        tl.store(weighted + offset, (total * factor.to(tl.float32)[:, None]).to(kind), mask=held)
        block = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares + block, tl.sum(total * total, 0), mask=row < rows)
    tl.store(result + offset, total.to(kind), mask=held)


@jit
def _add_products(total, values, x, k, held, rows, x_stride, KIND: tl.constexpr, ROWS: tl.constexpr):
    """total [columns, ROWS] plus the sums of values [columns, k] of a KIND times each row of x at k."""
    wide = values.to(tl.float32) if KIND == "float" else unpack_wide(values, KIND, x.dtype.element_ty == tl.bfloat16)
    row = tl.arange(0, ROWS)[None, :]
    for index in tl.static_range(ROWS):
        left = tl.load(x + tl.minimum(index, rows - 1) * x_stride + k, mask=held, other=0.0).to(tl.float32)
        total = tl.where(row == index, total + tl.sum(wide * left[None, :], 1)[:, None], total)
    return total


@partial(jit, unspecialized=("rows", "rank"))
def gemv_kernel(
    x,
    weight,
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
    rows,
    out,
    width,
    x_stride,
    weight_stride,
    scale_stride,
    residual_stride,
    blocks,
    eps,
    inboxes,
    calls,
    rank,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Programs [tiles of columns]; `weight_rows` says which columns a tile has. ONCE: width is at most BLOCK_K.

    Values are floats, a byte each with scales of rows, or int4, by which one row is multiplied, at once (`int4_gemv`).
    """
    kind: tl.constexpr = x.dtype.element_ty
    weight_row, column = weight_rows(tl.program_id(0), out, BLOCK_N, GATED)
    row = tl.arange(0, ROWS)
    scale = None
    if KIND == "int4":
        sizes = weight_row, weight_stride, scale_stride, width
        chunks = load_chunks(weight, scales, zeros, sizes, ROW_GROUP, GROUP, BLOCK_N, BLOCK_K)
        if row_scales is not None:
            scale = tl.load(row_scales + weight_row)
    else:
        k = tl.arange(0, BLOCK_K)
        held = k < width
        tile = weight + weight_row.to(tl.int64)[:, None] * weight_stride + k[None, :]
        if ONCE:
            values = tl.load(tile, mask=held[None, :], other=0.0, eviction_policy="evict_first")
        else:
            values = tl.load(tile, eviction_policy="evict_first")
        if KIND != "float":
            scale = scale_of_rows(scales, row_scales, weight_row, scale_stride, ROW_GROUP, 0)
    if bias is not None:
        bias = tl.load(bias + weight_row)
    if norm_weight is not None:
        norm_weight = tl.load(norm_weight + column, mask=column < out, other=0.0)
    if EARLY:
        # What precedes the wait may read what the step does not write: the model's parameters. Kernels that join or
        # receive start this one before their own wait is over.
        gdc_wait()
        gdc_launch_dependents()
    if row_squares is not None:
        row_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
    if residual is not None and KIND != "float":
        residual = load_residual(residual, residual_stride, row, column, rows, out)
    if KIND == "int4":
        total = dot_chunks(x, chunks, scale, zeros is None)
    else:
        total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        if residual is not None and KIND == "float":
            # Sums start from it, row by row: a whole tile of so few elements would be loaded many times over.
            for index in tl.static_range(ROWS):
                one = tl.load(
                    residual + tl.minimum(index, rows - 1) * residual_stride + column, mask=column < out, other=0.0
                )
                total = tl.where((row == index)[None, :], one.to(tl.float32)[:, None], total)
            residual = None
        last = 0
        if not ONCE:
            for start in range(BLOCK_K, width, BLOCK_K):
                # Asked for before the products of the tile before it are made.
                following = tl.load(tile + start, eviction_policy="evict_first")
                total = _add_products(total, values, x + last, k, held, rows, x_stride, KIND, ROWS)
                values = following
                last = start
        if inboxes is not None:
            # Here they are there in time, and take no registers from weights that are under way.
            inboxes, epochs = addresses(inboxes, WORLD), epochs_of(calls, row, rows)
        total = _add_products(total, values, x + last, k, held, rows, x_stride, KIND, ROWS)
        if scale is not None:
            total *= scale[:, None]
    if inboxes is not None:
        send_product(total, inboxes, epochs, tl.program_id(0), row, rows, out, rank, WORLD, kind)
    else:
        results = result, weighted, squares
        store_product(
            total, bias, row_squares, width, eps, residual, norm_weight, results, row, column, rows, out, GATED
        )


@partial(jit, unspecialized=("rows", "rank"))
def dot_kernel(
    x,
    weight,
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
    weight_stride,
    scale_stride,
    residual_stride,
    blocks,
    eps,
    inboxes,
    calls,
    rank,
    KIND: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    WORLD: tl.constexpr,
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
    """Programs [tiles of columns, SPLITS, tiles of rows]; `weight_rows` says which columns a tile has.

    FULL: all rows of all tiles are there. part: elements of k of a program. With splits, each program leaves its sums
    in parts [tiles of rows, tiles of columns, SPLITS, BLOCK_N, BLOCK_M] float32, and the last to arrive at its tile's
    counter adds them up, always in the order of k.
    GROUP: columns that share a scale, 0: all; a multiple of BLOCK_K, but for e2m1, where either is one of the other.
    STEPS: blocks of a turn of the loop, whose loads are under way together.
    Of 2:4, `weight` has int64 of four floats each, and `scales` their places.
    """
    kind: tl.constexpr = x.dtype.element_ty
    PACKED: tl.constexpr = KIND != "float"
    HALVES: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    SPARSE: tl.constexpr = KIND == "2:4"
    PAIR: tl.constexpr = 8 if SPARSE else (2 if HALVES else 1)
    SCALED_VALUES: tl.constexpr = KIND == "e2m1" and GROUP > 0
    SCALED_SUMS: tl.constexpr = KIND != "e2m1" and GROUP > 0
    tile, split = tl.program_id(0), tl.program_id(1)
    weight_row, column = weight_rows(tile, out, BLOCK_N, GATED)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_start = weight + weight_row.to(tl.int64) * weight_stride + split * (part // PAIR)
    if PIECES > 0:
        prefetch_weights(weight_start, PIECES)
    scale = None
    if SPARSE:
        place_tile = (scales + weight_row.to(tl.int64) * scale_stride + split * (part // PAIR))[:, None]
    elif PACKED:
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
    # What is small is asked for before the sums and there when they are.
    if inboxes is not None:
        inboxes, epochs = addresses(inboxes, WORLD), epochs_of(calls, row, rows)
    AHEAD: tl.constexpr = not PACKED and SPLITS == 1 and BLOCK_M * max(BLOCKS, BLOCK_N) <= 4096
    if AHEAD and row_squares is not None:
        early_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
    if AHEAD and residual is not None:
        early_residual = load_residual(residual, residual_stride, row, column, rows, out)
    k = tl.arange(0, BLOCK_K // PAIR)
    weight_tile = weight_start[:, None] + k[None, :]
    x_start = x + row.to(tl.int64) * x_stride + split * part
    if HALVES:
        x_start = x_start.to(tl.pointer_type(tl.uint64 if kind == tl.float32 else tl.uint32))
    if SPARSE:
        x_start = x_start.to(tl.pointer_type(tl.uint64))
        place_tile = place_tile + k[None, :]
        x_tile = x_start[None, :] + 2 * k[:, None]
    else:
        x_tile = x_start[None, :] + k[:, None]
    # Rows past the last are zeros. A copy of the last in their place would have all programs read the same few lines of
    # the L2 cache at once: 96 rows in tiles of 128 took one and a half times as long as 128.
    held = (row < rows)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for turn in tl.range(0, part, STEPS * BLOCK_K, num_stages=STAGES):
        for step in tl.static_range(STEPS):
            if SCALED_SUMS:
                # Asked for a turn before they are wanted.
                group_scale = following
                after = tl.minimum(turn + step * BLOCK_K + BLOCK_K, part - 1) // GROUP
                following = tl.load(scales + group_start + after)
                if zeros is not None:
                    zero = following_zero
                    following_zero = tl.load(zeros + group_start + after)
            if not PACKED:
                x_part = tl.load(x_tile) if FULL else tl.load(x_tile, mask=held, other=0.0)
                total = tl.dot(tl.load(weight_tile, eviction_policy="evict_first"), x_part, total)
            elif SPARSE:
                packed = tl.load(weight_tile, eviction_policy="evict_first")
                places = tl.load(place_tile, eviction_policy="evict_first")
                a, b, c, d, e, f, g, h = eight_columns(packed, places, kind)
                total = four_dots(a, b, c, d, x_tile, held, total, FULL, kind)
                total = four_dots(e, f, g, h, x_tile + 1, held, total, FULL, kind)
                place_tile += BLOCK_K // PAIR
                x_tile += BLOCK_K // PAIR
            elif HALVES:
                packed = tl.load(weight_tile, eviction_policy="evict_first")
                low, high = unpack_halves(packed, KIND, zeros is None, kind)
                if zeros is not None:
                    low = low - zero.to(kind)[:, None]
                    high = high - zero.to(kind)[:, None]
                if SCALED_VALUES:
                    EACH: tl.constexpr = GROUP // 2 if GROUP < BLOCK_K else BLOCK_K // 2
                    start = scales + group_start + (turn + step * BLOCK_K) // GROUP
                    spread = scales_of_bytes(start, BLOCK_N, BLOCK_K // 2, EACH, kind)
                    low = low * spread
                    high = high * spread
                even, odd = halves_of_x(x_tile, held, FULL, kind)
                if SCALED_SUMS:
                    sums = tl.dot(high, odd, tl.dot(low, even))
                    total += sums * wide_scale(group_scale)[:, None]
                else:
                    total = tl.dot(high, odd, tl.dot(low, even, total))
            else:
                packed = tl.load(weight_tile, eviction_policy="evict_first")
                x_part = tl.load(x_tile) if FULL else tl.load(x_tile, mask=held, other=0.0)
                wide = unpack_bytes(packed, KIND, kind)
                if SCALED_SUMS:
                    total += tl.dot(wide, x_part) * wide_scale(group_scale)[:, None]
                else:
                    total = tl.dot(wide, x_part, total)
            weight_tile += BLOCK_K // PAIR
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
            own_squares = early_squares if AHEAD else load_squares(row_squares, row, rows, blocks, BLOCKS)
        if residual is not None:
            own_residual = early_residual if AHEAD else load_residual(residual, residual_stride, row, column, rows, out)
        if SPLITS > 1:
            # Past the nearest cache, which knows nothing of other programs' writes.
            total = tl.load(first, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(first + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(counters + offset, 0)
        if scale is not None:
            total *= scale[:, None]
        if inboxes is not None:
            send_product(total, inboxes, epochs, tile, row, rows, out, rank, WORLD, kind)
        else:
            results, width = (result, weighted, squares), part * SPLITS
            store_product(
                total, bias, own_squares, width, eps, own_residual, norm_weight, results, row, column, rows, out, GATED
            )
