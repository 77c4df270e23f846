"""The Triton kernel of attention for sequences with any numbers of new tokens.

The softmax is computed in one pass (FlashAttention-2, Dao 2023), and the query heads that share a KV head are rows of
one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from strata.kernels.attention.query_tiles import sequence_of_tile
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.state.rounded_triton import exponent_at, powers_of
from strata.kernels.triton_import import jit, tl

LOG2_E = 1.4426950408889634


@jit
def join_sink(maximum, weight, result, sinks, head, held):
    """The softmax of queries [rows] once the sink of each one's head, a score without a value, is part of it.

    maximum, weight [rows] and result [rows, HEAD_PAD] float32, the maximum in powers of two. The arithmetic is written
    as one `fma`, because compilers may round otherwise in another kernel.
    """
    score = tl.load(sinks + head, mask=held, other=0.0).to(tl.float32) * 1.4426950408889634
    largest = tl.maximum(maximum, score)
    shrink = tl.exp2(maximum - largest)
    return largest, tl.fma(weight, shrink, tl.exp2(score - largest)), result * shrink[:, None]


@jit
def key_slots(positions, held, first, table, PAGE_SIZE: tl.constexpr):
    """Where the keys at `positions` lie, in tokens from the start of k and v; PAGE_SIZE 0: packed, from `first` on."""
    if PAGE_SIZE == 0:
        return (first + positions).to(tl.int64)
    page = tl.load(table + positions // PAGE_SIZE, mask=held, other=0).to(tl.int64)
    return page * PAGE_SIZE + positions % PAGE_SIZE


@jit
def widened(rows, exponents, slots, held, kind: tl.constexpr, PAGE_SIZE: tl.constexpr, AS_COLUMNS: tl.constexpr):
    """Keys [HEAD_PAD, rows] (AS_COLUMNS) or values [rows, HEAD_PAD] in 8 bits as what they stand for, exactly; zeros
    where not held. exponents: from the first page's of this head on."""
    powers = powers_of(tl.load(exponents + exponent_at(slots, 0, tl.num_programs(0), PAGE_SIZE), mask=held, other=127))
    powers = powers[None, :] if AS_COLUMNS else powers[:, None]
    return (rows.to(tl.float32) * powers).to(kind)


@jit
def attend_block(
    queries,
    at,
    maximum,
    weight,
    result,
    start,
    total,
    k,
    v,
    k_exponents,
    v_exponents,
    first,
    table,
    scale,
    k_stride,
    v_stride,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One block of keys [start, start + BLOCK_N) joins the running softmax of a tile of queries.

    queries [rows, HEAD_PAD]; at [rows]: position of each; maximum, weight [rows] and result [rows, HEAD_PAD] float32:
    the largest score so far (in powers of two), the sum of the weights, the weighted sum of the values. A block of
    which a row sees nothing leaves the row's state as it is, bit for bit.
    """
    positions = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, HEAD_PAD)
    held = positions < total
    slots = key_slots(positions, held, first, table, PAGE_SIZE)
    k_mask = (columns < HEAD_DIM)[:, None]
    v_mask = (columns < HEAD_DIM)[None, :]
    if MASKED:
        k_mask = k_mask & held[None, :]
        v_mask = v_mask & held[:, None]
    keys = tl.load(k + slots[None, :] * k_stride + columns[:, None], mask=k_mask, other=0.0)
    values = tl.load(v + slots[:, None] * v_stride + columns[None, :], mask=v_mask, other=0.0)
    if k_exponents is not None:
        keys = widened(keys, k_exponents, slots, held, queries.dtype, PAGE_SIZE, True)
        values = widened(values, v_exponents, slots, held, queries.dtype, PAGE_SIZE, False)
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if MASKED:
        visible = positions[None, :] <= at[:, None]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > at[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    weight = weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@partial(jit, unspecialized=("starts", "offsets", "bounds", "lengths", "tables", "sequences", "table_stride", "rank"))
def attention_kernel(
    q,
    k,
    v,
    k_exponents,
    v_exponents,
    out,
    starts,
    offsets,
    bounds,
    lengths,
    tables,
    sinks,
    sequences,
    scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    sums,
    rank,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BOUNDED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr = 1,
):
    """Programs [kv_heads, tokens // (BLOCK_M // GROUP) + sequences]: a tile of queries of one sequence each.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]), the last of its tokens. BOUNDED: only sequences
    [bounds[0], bounds[1]) have any; the programs of the others end at once. PAGE_SIZE 0: k and v are packed like q from
    starts on, and lengths and tables are not read. SINKS: otherwise `sinks` is not read. k_exponents, v_exponents:
    [pages, kv_heads, PAGE_SIZE] of pools in 8 bits, or None. sums: [tokens, heads] float32, takes the logarithm of each
    query's sum of exponentials; None: nobody wants it. RANKS: so many divide the keys of a sequence, and the pages here
    hold those of number `rank` (`KeptKeys`); then there is no window.
    """
    kv_head = tl.program_id(0)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    lowest_sequence = 0
    beyond = sequences
    skipped = 0
    if BOUNDED:
        lowest_sequence = tl.load(bounds)
        beyond = tl.load(bounds + 1)
        skipped = tl.load(starts + lowest_sequence)
        if tile >= (tl.load(offsets + beyond) - skipped) // TILE_QUERIES + beyond - lowest_sequence:
            return
    sequence = sequence_of_tile(tile, starts, lowest_sequence, beyond, skipped, TILE_QUERIES)
    first = tl.load(starts + sequence)
    new = tl.load(offsets + sequence + 1) - first
    query_start = (tile - (first - skipped) // TILE_QUERIES - (sequence - lowest_sequence)) * TILE_QUERIES
    if query_start >= new:
        return
    total = new if PAGE_SIZE == 0 else tl.load(lengths + sequence)

    row = tl.arange(0, BLOCK_M)
    query = query_start + row // GROUP
    held = (query < new) & (row < TILE_QUERIES * GROUP)
    head = kv_head * GROUP + row % GROUP
    columns = tl.arange(0, HEAD_PAD)
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    token = (first + query).to(tl.int64)
    queries = tl.load(q + (token * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)

    at = total - new + query
    lowest = total - new + query_start
    end = tl.minimum(total, lowest + TILE_QUERIES)
    if RANKS > 1:  # positions become places among the keys here: that of a query is the last key that it sees
        at = (at + RANKS - rank) // RANKS - 1
        lowest = (lowest + RANKS - rank) // RANKS - 1
        end = (end + RANKS - 1 - rank) // RANKS
        total = (total + RANKS - 1 - rank) // RANKS
    start = 0
    if WINDOW > 0:
        start = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    if k_exponents is not None:
        k_exponents += kv_head * PAGE_SIZE
        v_exponents += kv_head * PAGE_SIZE
    table = tables + sequence * table_stride

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    if WINDOW == 0:
        # Blocks that every row sees whole need no mask.
        whole = (lowest + 1) // BLOCK_N * BLOCK_N
        for block in range(0, whole, BLOCK_N):
            maximum, weight, result = attend_block(
                queries, at, maximum, weight, result, block, total, k, v, k_exponents, v_exponents,
                first, table, scale, k_stride, v_stride, False, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
        start = tl.maximum(whole, 0)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = attend_block(
            queries, at, maximum, weight, result, block, total, k, v, k_exponents, v_exponents,
            first, table, scale, k_stride, v_stride, True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    if SINKS:
        maximum, weight, result = join_sink(maximum, weight, result, sinks, head, held)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    HEADS = tl.num_programs(0) * GROUP
    if sums is not None:
        tl.store(sums + token * HEADS + head, (maximum + tl.log2(weight)) * 0.6931471805599453, mask=held)
    target = out + ((token * HEADS + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Tile:
    """rows: query rows (queries times the heads of a group); keys: of a block; warps and stages of the pipeline.

    registers: the most that a thread may have, None: as many as the compiler takes.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def mixed_tile(head_dim: int, dtype: torch.dtype, page_size: int) -> Tile:
    """page_size: 0 for keys and values that are packed."""
    if dtype == torch.float32:
        return Tile(32, 16, 8, 2)
    if head_dim > 128:
        return Tile(128, 32, 8, 2)
    # With 128 registers a thread two programs fit on a multiprocessor of Hopper, worth more than the bytes that spill:
    # on an H200 8192 tokens with head_dim 128 run at 420 instead of 310 TFLOP/s. Packed keys take too much shared
    # memory for two, and the masks of padded heads too many registers.
    both_fit = page_size > 0 and head_pad(head_dim) == head_dim
    return Tile(128, 64, 8, 3, 128 if both_fit else None)


def head_pad(head_dim: int) -> int:
    """The columns of a tile: a power of two, and at least the 16 that a matrix instruction sums over."""
    padded: int = max(16, next_power_of_2(head_dim))
    return padded
