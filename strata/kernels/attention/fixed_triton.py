"""Triton kernels of deterministic attention: prefill and decode that leave the same bits.

The keys of a sequence are divided into parts at fixed positions. Each part has a softmax of its own, computed by the
same instructions whether a program goes through all parts (prefill) or has one of them (decode); and the parts are
joined one by one, from the first on, by the same arithmetic. A product and a sum that a compiler might round once or
twice are written as one `fma`, because it may decide otherwise in another kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from strata.kernels.attention.varlen_triton import Tile, head_pad, join_sink, key_slots, widened
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.triton_import import jit, tl

# Keys of a part, and after how many parts their size doubles; see `part_start`.
PART_KEYS = 256
PARTS = 16
# Parts that the last program of a decoding sequence loads at once.
JOINED_TOGETHER = 4


@jit
def part_start(part, PART_KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Position of the first key of a part.

    Parts have PART_KEYS keys up to position 2 * PARTS * PART_KEYS, twice as many up to twice that position, and so on,
    as floating-point numbers are spaced: a long sequence has few parts, and the last are a small share of it.
    """
    doublings = max(part // PARTS - 1, 0)
    return (part - doublings * PARTS) * PART_KEYS << doublings


@jit
def part_at(position, PART_KEYS: tl.constexpr, PARTS: tl.constexpr):
    """The part that a position lies in."""
    doublings = 0
    while (position // PART_KEYS) >> doublings >= 2 * PARTS:
        doublings += 1
    return ((position // PART_KEYS) >> doublings) + doublings * PARTS


@jit
def _attend(
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
    """One block of keys [start, start + BLOCK_N) joins the running softmax of a part.

    queries [rows, HEAD_PAD]; at [rows]: position of each; maximum, weight [rows] and result [rows, HEAD_PAD] float32:
    the largest score so far (in powers of two), the sum of the weights, the weighted sum of the values. Bit for bit, a
    block of which a row sees nothing leaves the row's state as it is, and one that it sees whole does not need MASKED.
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
    scores = tl.dot(queries, keys, input_precision="ieee")
    if MASKED:
        visible = positions[None, :] <= at[:, None]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > at[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    shrink = tl.exp2(maximum - shift)
    weight = tl.fma(weight, shrink, tl.sum(weights, 1))
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@jit
def _join(maximum, weight, result, part_maximum, part_weight, part_result):
    """The softmax of some parts and the part after them. One that a row sees nothing of changes nothing."""
    largest = tl.maximum(maximum, part_maximum)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    shrink = tl.exp2(maximum - shift)
    share = tl.exp2(part_maximum - shift)
    weight = tl.fma(part_weight, share, weight * shrink)
    result = tl.fma(part_result, share[:, None], result * shrink[:, None])
    return largest, weight, result


@jit
def _empty(ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """The softmax of no keys."""
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    return maximum, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, HEAD_PAD), tl.float32)


@jit
def _store(out, result, weight, token, head, heads, held, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    columns = tl.arange(0, HEAD_PAD)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    target = out + ((token * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=held[:, None] & (columns < HEAD_DIM)[None, :])


@partial(jit, unspecialized=("offsets", "lengths", "tables", "sequences", "table_stride"))
def fixed_prefill_kernel(
    q,
    k,
    v,
    k_exponents,
    v_exponents,
    out,
    offsets,
    lengths,
    tables,
    sinks,
    sequences,
    scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [kv_heads, tokens // (BLOCK_M // GROUP) + sequences]: a tile of queries of one sequence each.

    The first sequence starts at row 0, whatever offsets[0] is. PAGE_SIZE 0: k and v are packed like q, and lengths and
    tables are not read.
    """
    kv_head = tl.program_id(0)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    # Sequence s starts with tile (row // TILE_QUERIES) + s: find the last that starts at this tile or before.
    skipped = tl.load(offsets)
    sequence = 0
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if (tl.load(offsets + middle) - skipped) // TILE_QUERIES + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    first = tl.load(offsets + sequence) - skipped
    new = tl.load(offsets + sequence + 1) - skipped - first
    query_start = (tile - first // TILE_QUERIES - sequence) * TILE_QUERIES
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
    start = 0
    if WINDOW > 0:
        start = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    if k_exponents is not None:
        k_exponents += kv_head * PAGE_SIZE
        v_exponents += kv_head * PAGE_SIZE
    table = tables + sequence * table_stride

    maximum, weight, result = _empty(BLOCK_M, HEAD_PAD)
    part_maximum, part_weight, part_result = _empty(BLOCK_M, HEAD_PAD)
    part = part_at(start, PART_KEYS, PARTS)
    part_end = part_start(part + 1, PART_KEYS, PARTS)
    if WINDOW == 0:
        # Blocks that every row sees whole need no mask.
        whole = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, 0)
        for block in range(0, whole, BLOCK_N):
            part_maximum, part_weight, part_result = _attend(
                queries, at, part_maximum, part_weight, part_result, block, total, k, v,
                k_exponents, v_exponents, first, table, scale, k_stride, v_stride,
                False, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
            if block + BLOCK_N == part_end:
                maximum, weight, result = _join(maximum, weight, result, part_maximum, part_weight, part_result)
                part_maximum, part_weight, part_result = _empty(BLOCK_M, HEAD_PAD)
                part += 1
                part_end = part_start(part + 1, PART_KEYS, PARTS)
        start = whole
    for block in range(start, end, BLOCK_N):
        part_maximum, part_weight, part_result = _attend(
            queries, at, part_maximum, part_weight, part_result, block, total, k, v,
            k_exponents, v_exponents, first, table, scale, k_stride, v_stride,
            True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        if block + BLOCK_N == part_end:
            maximum, weight, result = _join(maximum, weight, result, part_maximum, part_weight, part_result)
            part_maximum, part_weight, part_result = _empty(BLOCK_M, HEAD_PAD)
            part += 1
            part_end = part_start(part + 1, PART_KEYS, PARTS)
    maximum, weight, result = _join(maximum, weight, result, part_maximum, part_weight, part_result)
    if SINKS:
        maximum, weight, result = join_sink(maximum, weight, result, sinks, head, held)
    _store(out, result, weight, token, head, tl.num_programs(0) * GROUP, held, HEAD_DIM, HEAD_PAD)


@partial(jit, unspecialized=("offsets", "lengths", "tables", "table_stride"))
def fixed_decode_kernel(
    q,
    k,
    v,
    k_exponents,
    v_exponents,
    out,
    maxima,
    weights,
    results,
    counters,
    offsets,
    lengths,
    tables,
    sinks,
    scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Programs [kv_heads, parts, sequences]: one query over the keys of one part.

    maxima, weights [sequences, parts, heads] and results [sequences, parts, heads, HEAD_DIM] float32: where the parts
    of a sequence wait for the last of its programs, which joins them. counters: of `split_counters`.
    """
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(offsets + sequence)
    new = tl.load(offsets + sequence + 1) - first
    total = tl.load(lengths + sequence)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(total - WINDOW, 0)
    start = tl.maximum(part_start(part, PART_KEYS, PARTS), lowest // BLOCK_N * BLOCK_N)
    end = tl.minimum(part_start(part + 1, PART_KEYS, PARTS), total)
    # A padding row has no keys, and one program that says so.
    if (new == 0) | (start >= end) & ((total > 0) | (part > 0)):
        return
    row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + row
    held = row < GROUP
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    token = first.to(tl.int64)
    queries = tl.load(q + token * q_stride + (head * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)
    at = tl.full((BLOCK_M,), 0, tl.int32) + total - 1
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    if k_exponents is not None:
        k_exponents += kv_head * PAGE_SIZE
        v_exponents += kv_head * PAGE_SIZE
    table = tables + sequence * table_stride

    maximum, weight, result = _empty(BLOCK_M, HEAD_PAD)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = _attend(
            queries, at, maximum, weight, result, block, total, k, v,
            k_exponents, v_exponents, first, table, scale, k_stride, v_stride,
            True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    heads = tl.num_programs(0) * GROUP
    first_part = part_at(lowest, PART_KEYS, PARTS)
    last_part = part_at(tl.maximum(total - 1, 0), PART_KEYS, PARTS)
    if first_part == last_part:
        if SINKS:
            maximum, weight, result = join_sink(maximum, weight, result, sinks, head, held)
        _store(out, result, weight, token, head, heads, held, HEAD_DIM, HEAD_PAD)
        return

    base = sequence.to(tl.int64) * tl.num_programs(1)
    target = (base + part) * heads + head
    tl.store(maxima + target, maximum, mask=held)
    tl.store(weights + target, weight, mask=held)
    tl.store(results + (target * HEAD_DIM)[:, None] + columns[None, :], result, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    counter = counters + sequence * tl.num_programs(0) + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") < last_part - first_part:
        return
    tl.store(counter, 0)
    row = tl.arange(0, JOIN_ROWS)
    head = kv_head * GROUP + row
    held = row < GROUP
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    joined_maximum, joined_weight, joined_result = _empty(JOIN_ROWS, HEAD_PAD)
    for some in range(first_part, last_part + 1, UNROLL):
        # Unrolled so that the loads of several parts are under way together; a part past the last is empty.
        for index in tl.static_range(UNROLL):
            there = held & (some + index <= last_part)
            source = (base + some + index) * heads + head
            part_maximum = tl.load(maxima + source, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_weight = tl.load(weights + source, mask=there, other=0.0, cache_modifier=".cg")
            part_result = tl.load(
                results + (source * HEAD_DIM)[:, None] + columns[None, :],
                mask=mask & (some + index <= last_part),
                other=0.0,
                cache_modifier=".cg",
            )
            joined_maximum, joined_weight, joined_result = _join(
                joined_maximum, joined_weight, joined_result, part_maximum, part_weight, part_result
            )
    if SINKS:
        joined_maximum, joined_weight, joined_result = join_sink(
            joined_maximum, joined_weight, joined_result, sinks, head, held
        )
    _store(out, joined_result, joined_weight, token, head, heads, held, HEAD_DIM, HEAD_PAD)


def prefill_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """Twice the rows of decoding where registers allow: two groups of warps that run what decoding's one group runs."""
    tile = decode_tile(head_dim, dtype)
    return Tile(128, tile.keys, 8, 5) if dtype != torch.float32 and head_dim <= 128 else tile


def decode_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """At least the 64 rows of one wgmma instruction, few of which hold queries: it takes less time than the keys."""
    if dtype == torch.float32:
        return Tile(32, 16, 8, 2)
    return Tile(64, 64, 4, 5) if head_dim <= 128 else Tile(64, 32, 8, 5)


def shape_constants(head_dim: int, window: int) -> dict[str, Any]:
    """What both kernels are compiled for besides the group and the pages."""
    shape = {"HEAD_DIM": head_dim, "HEAD_PAD": head_pad(head_dim), "WINDOW": window}
    return shape | {"PART_KEYS": PART_KEYS, "PARTS": PARTS}


def join_constants(group: int) -> dict[str, Any]:
    return {"JOIN_ROWS": next_power_of_2(group), "UNROLL": JOINED_TOGETHER}
