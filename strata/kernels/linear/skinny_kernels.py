"""The Triton kernels of products with few rows: `gemv_kernel` on the CUDA cores, `dot_kernel` on the tensor cores.

Both sum a tile [BLOCK_N, BLOCK_M] in float32, rows of the weight by rows of x, and both end in `store_product`, or in
`send_product` where ranks add the product up: inboxes [WORLD] int64 are the addresses of theirs, calls [rows] int32 the
counters of the receiver's programs, and rank the number of this one. Arguments that a product has no use for are None.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.collective.all_reduce import addresses
from strata.kernels.collective.sent_products import epochs_of, send_product
from strata.kernels.compile_case import CompileCase
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def prefetch_weights(start, PIECES: tl.constexpr):
    """Bring PIECES times 128 elements from each pointer of start [BLOCK_N] into the L2 cache."""
    piece = start[:, None] + tl.arange(0, PIECES)[None, :] * 128
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
    total,
    bias,
    row_squares,
    width,
    eps,
    residual,
    factor,
    result,
    weighted,
    squares,
    row,
    column,
    rows,
    out,
    GATED: tl.constexpr,
):
    """Turn a tile of sums into a tile of the result, and store it.

    bias, factor (the norm's weights): [BLOCK_N]; row_squares [BLOCK_M, BLOCKS] and residual [BLOCK_N, BLOCK_M] as
    loaded above. weighted [rows, out] and squares [rows, tiles] are stored if there is a factor.
    """
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
def _add_products(total, values, x, k, held, rows, x_stride, ROWS: tl.constexpr):
    """total [columns, ROWS] plus the sums of values [columns, k] times each row of x at k."""
    wide = values.to(tl.float32)
    row = tl.arange(0, ROWS)[None, :]
    for index in tl.static_range(ROWS):
        left = tl.load(x + tl.minimum(index, rows - 1) * x_stride + k, mask=held, other=0.0).to(tl.float32)
        total = tl.where(row == index, total + tl.sum(wide * left[None, :], 1)[:, None], total)
    return total


@partial(jit, unspecialized=("rows", "rank"))
def gemv_kernel(
    x,
    weight,
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
    residual_stride,
    blocks,
    eps,
    inboxes,
    calls,
    rank,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Programs [tiles of columns]; `weight_rows` says which columns a tile has. ONCE: width is at most BLOCK_K."""
    weight_row, column = weight_rows(tl.program_id(0), out, BLOCK_N, GATED)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    held = k < width
    tile = weight + weight_row.to(tl.int64)[:, None] * weight_stride + k[None, :]
    if ONCE:
        values = tl.load(tile, mask=held[None, :], other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(tile, eviction_policy="evict_first")
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
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    if residual is not None:
        # Sums start from it, row by row: a whole tile of so few elements would be loaded many times over.
        for index in tl.static_range(ROWS):
            one = tl.load(
                residual + tl.minimum(index, rows - 1) * residual_stride + column, mask=column < out, other=0.0
            )
            total = tl.where((row == index)[None, :], one.to(tl.float32)[:, None], total)
    last = 0
    if not ONCE:
        for start in range(BLOCK_K, width, BLOCK_K):
            # Asked for before the products of the tile before it are made.
            following = tl.load(tile + start, eviction_policy="evict_first")
            total = _add_products(total, values, x + last, k, held, rows, x_stride, ROWS)
            values = following
            last = start
    if inboxes is not None:
        # Here they are there in time, and take no registers from weights that are under way.
        inboxes, epochs = addresses(inboxes, WORLD), epochs_of(calls, row, rows)
    total = _add_products(total, values, x + last, k, held, rows, x_stride, ROWS)
    if inboxes is not None:
        kind: tl.constexpr = x.dtype.element_ty
        send_product(total, inboxes, epochs, tl.program_id(0), row, rows, out, rank, WORLD, kind)
    else:
        store_product(
            total,
            bias,
            row_squares,
            width,
            eps,
            None,
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


@partial(jit, unspecialized=("rows", "rank"))
def dot_kernel(
    x,
    weight,
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
    residual_stride,
    blocks,
    eps,
    inboxes,
    calls,
    rank,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Programs [tiles of columns, SPLITS, tiles of rows]; `weight_rows` says which columns a tile has.

    FULL: all rows of all tiles are there. part: elements of k of a program. With splits, each program leaves its sums
    in parts [tiles of rows, tiles of columns, SPLITS, BLOCK_N, BLOCK_M] float32, and the last to arrive at its tile's
    counter adds them up, always in the order of k.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    weight_row, column = weight_rows(tile, out, BLOCK_N, GATED)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_start = weight + weight_row.to(tl.int64) * weight_stride + split * part
    if PIECES > 0:
        prefetch_weights(weight_start, PIECES)
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
    AHEAD: tl.constexpr = SPLITS == 1 and BLOCK_M * max(BLOCKS, BLOCK_N) <= 4096
    if AHEAD and row_squares is not None:
        early_squares = load_squares(row_squares, row, rows, blocks, BLOCKS)
    if AHEAD and residual is not None:
        early_residual = load_residual(residual, residual_stride, row, column, rows, out)
    k = tl.arange(0, BLOCK_K)
    weight_tile = weight_start[:, None] + k[None, :]
    x_tile = (x + row.to(tl.int64) * x_stride + split * part)[None, :] + k[:, None]
    # Rows past the last are zeros. A copy of the last in their place would have all programs read the same few lines of
    # the L2 cache at once: 96 rows in tiles of 128 took one and a half times as long as 128.
    held = (row < rows)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        x_part = tl.load(x_tile) if FULL else tl.load(x_tile, mask=held, other=0.0)
        total = tl.dot(tl.load(weight_tile, eviction_policy="evict_first"), x_part, total)
        weight_tile += BLOCK_K
        x_tile += BLOCK_K
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
        if inboxes is not None:
            kind: tl.constexpr = x.dtype.element_ty
            send_product(total, inboxes, epochs, tile, row, rows, out, rank, WORLD, kind)
        else:
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
    cases = []
    epilogues = (("plain", False), ("scaled", False), ("scaled", True), ("added", False), ("sent", False))
    for epilogue, gated in epilogues:
        name = "gated" if gated else epilogue
        for columns, block, warps, once, rows in (
            (4, 4096, 8, True, 1),
            (4, 2048, 4, False, 1),
            (4, 2048, 4, False, 4),
        ):
            signature, constants = _arguments(epilogue, gated, columns, block, ("width",))
            constants |= {"ROWS": rows, "ONCE": once}
            loads = ("ld.global.L1::evict_first", "v4.b32", "griddepcontrol.wait")
            title = f"gemv {name} of {rows} {columns}x{block}"
            cases.append(CompileCase(title, gemv_kernel, signature, constants, warps, 2, loads))
        for columns, block, warps, stages, rows, splits, product in (
            (16, 256, 2, 4, 8, 1, "mma.sync"),
            (64, 128, 4, 4, 16, 8, "wgmma.mma_async"),
            (64, 128, 4, 4, 64, 4, "wgmma.mma_async"),
            (128, 128, 8, 4, 16, 1, "wgmma.mma_async"),
            (128, 64, 8, 5, 128, 1, "wgmma.mma_async"),
            (64, 64, 8, 4, 256, 2, "wgmma.mma_async"),
        ):
            if epilogue == "sent" and (splits > 1 or rows > 16):
                continue  # few rows are, by programs that have all of a column's sum
            split = ("parts", "counters") if splits > 1 else ()
            signature, constants = _arguments(epilogue, gated, columns, block, ("part", *split))
            constants |= {"BLOCK_M": rows, "FULL": rows < 64, "STAGES": stages, "SPLITS": splits, "PIECES": 4}
            constants |= {} if split else {"parts": None, "counters": None}
            must = (product, "cp.async.cg.shared.global", "cp.async.bulk.prefetch.L2", *["atom"] * (splits > 1))
            title = f"dot {name} {rows}x{columns}x{block}/{splits}"
            cases.append(CompileCase(title, dot_kernel, signature, constants, warps, stages, must))
    return cases


def _arguments(
    epilogue: str, gated: bool, columns: int, block: int, more: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, object]]:
    """The types of a kernel's arguments and its constants, with what its epilogue has no use for."""
    own = {"plain": ("result",), "scaled": _SCALED, "added": _ADDED, "sent": _SENT}[epilogue]
    given = ("x", "weight", "out", "x_stride", "weight_stride", *own, *more)
    signature = {name: _KINDS[name] for name in given} | {"rows": "i32"}
    constants = dict.fromkeys((name for name in ("bias", *_SCALED, *_ADDED, *_SENT) if name not in own), None)
    constants |= {"GATED": gated, "EARLY": True, "WORLD": 2, "BLOCKS": 64 if epilogue == "scaled" else 1}
    return signature, constants | {"BLOCK_N": columns, "BLOCK_K": block}


_SCALED = ("result", "row_squares", "blocks", "eps")
_ADDED = ("result", "residual", "residual_stride", "norm_weight", "weighted", "squares")
_SENT = ("inboxes", "calls", "rank")
_KINDS = (
    dict.fromkeys(("x", "weight", "result", "residual", "norm_weight", "weighted"), "*bf16:16")
    | dict.fromkeys(("row_squares", "squares", "parts"), "*fp32:16")
    | dict.fromkeys(("out", "width", "part", "x_stride", "weight_stride", "residual_stride", "blocks"), "i32:16")
    | {"counters": "*i32:16", "eps": "fp32", "inboxes": "*i64:16", "calls": "*i32:16", "rank": "i32"}
)
