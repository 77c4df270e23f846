"""The Triton kernel of attention for sequences with any numbers of new tokens.

Keys are packed or in pages, all are seen or chosen blocks alone, and there is one softmax or, batch-invariant, one for
each segment. The query heads that share a KV head are rows of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from strata.kernels.attention.softmax_triton import (
    attend_block,
    join_segments,
    join_sink,
    no_keys,
    queries_of_tile,
    segment_at,
    segment_start,
    with_queries,
)
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.triton_import import jit, tl

LOG2_E = 1.4426950408889634


@partial(
    jit,
    unspecialized=(
        "starts", "offsets", "bounds", "lengths", "tables", "sequences", "table_stride", "blocks", "lists", "rank"
    ),
)  # fmt: skip
def attention_kernel(
    q,
    k,
    v,
    k_exponents,
    v_exponents,
    out,
    kept,
    counts,
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
    blocks,
    lists,
    sums,
    rank,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr = 1,
    BLOCK: tl.constexpr = 0,
    SEGMENT_KEYS: tl.constexpr = 0,
    SEGMENTS: tl.constexpr = 0,
):
    """Programs [kv_heads, tokens // TILE_QUERIES + sequences]: a tile of queries of one sequence each.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]), the last of its tokens. bounds: only sequences
    [bounds[0], bounds[1]) have any, and the programs of the others end at once; None: any may. PAGE_SIZE 0: k and v are
    packed like q from starts on, and lengths and tables are not read. sinks: [heads] or None. k_exponents, v_exponents:
    [pages, kv_heads, PAGE_SIZE] of pools in 8 bits, or None. sums: [tokens, heads] float32, takes the logarithm of each
    query's sum of exponentials; None: nobody wants it. RANKS: so many divide the keys of a sequence, and the pages here
    hold those of number `rank` (`DcpShard`); then there is no window.
    BLOCK: keys of a block of which only some are seen, 0: all are. kept [kv_heads, lists, blocks] and counts [kv_heads,
    lists]: of `chosen_blocks_kernel`, for blocks of queries of which tiles are parts.
    SEGMENTS: of `segment_start`, batch-invariant attention; 0: one softmax over all keys. The first sequence's queries
    begin the tiles then, whatever starts[0] is.
    """
    kv_head = tl.program_id(0)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low, beyond, skipped = with_queries(starts, bounds, sequences)
    if SEGMENTS > 0:
        skipped = tl.load(starts)
    if bounds is not None and tile >= (tl.load(offsets + beyond) - skipped) // TILE_QUERIES + beyond - low:
        return
    sequence, first, new, query_start = queries_of_tile(tile, starts, offsets, low, beyond, skipped, TILE_QUERIES)
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

    maximum, weight, result = no_keys(BLOCK_M, HEAD_PAD)
    if SEGMENTS > 0:
        joined_maximum, joined_weight, joined_result = no_keys(BLOCK_M, HEAD_PAD)
        part = segment_at(start, SEGMENT_KEYS, SEGMENTS)
        part_end = segment_start(part + 1, SEGMENT_KEYS, SEGMENTS)
    if BLOCK > 0:
        own = kv_head.to(tl.int64) * lists + first // BLOCK + sequence + query_start // BLOCK
        listed = kept + own * blocks
        # From the first block that not all rows see whole on all are kept, to the last that a query of the list sees.
        partly = (lowest + 1) // BLOCK
        list_end = tl.minimum(query_start // BLOCK * BLOCK + BLOCK, new)
        whole = tl.load(counts + own) - ((total - new + list_end - 1) // BLOCK - partly + 1)
        PER: tl.constexpr = BLOCK // BLOCK_N
        block = tl.load(listed) * BLOCK
        for piece in range(whole * PER):
            here = block + piece % PER * BLOCK_N
            # Looked up a piece ahead: loads that wait for a lookup could not be pipelined.
            block = tl.load(listed + tl.minimum((piece + 1) // PER, blocks - 1)) * BLOCK
            maximum, weight, result = attend_block(
                queries, at, maximum, weight, result, here, total, k, v, k_exponents, v_exponents,
                first, table, scale, k_stride, v_stride, False, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N, False,
            )  # fmt: skip
        start = partly * BLOCK
    elif WINDOW == 0:
        # Blocks that every row sees whole need no mask.
        whole = (lowest + 1) // BLOCK_N * BLOCK_N
        for block in range(0, whole, BLOCK_N):
            maximum, weight, result = attend_block(
                queries, at, maximum, weight, result, block, total, k, v, k_exponents, v_exponents, first, table,
                scale, k_stride, v_stride, False, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N, SEGMENTS > 0,
            )  # fmt: skip
            if SEGMENTS > 0 and block + BLOCK_N == part_end:
                joined_maximum, joined_weight, joined_result = join_segments(
                    joined_maximum, joined_weight, joined_result, maximum, weight, result
                )
                maximum, weight, result = no_keys(BLOCK_M, HEAD_PAD)
                part += 1
                part_end = segment_start(part + 1, SEGMENT_KEYS, SEGMENTS)
        start = tl.maximum(whole, 0)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = attend_block(
            queries, at, maximum, weight, result, block, total, k, v, k_exponents, v_exponents, first, table,
            scale, k_stride, v_stride, True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N, SEGMENTS > 0,
        )  # fmt: skip
        if SEGMENTS > 0 and block + BLOCK_N == part_end:
            joined_maximum, joined_weight, joined_result = join_segments(
                joined_maximum, joined_weight, joined_result, maximum, weight, result
            )
            maximum, weight, result = no_keys(BLOCK_M, HEAD_PAD)
            part += 1
            part_end = segment_start(part + 1, SEGMENT_KEYS, SEGMENTS)
    if SEGMENTS > 0:
        maximum, weight, result = join_segments(joined_maximum, joined_weight, joined_result, maximum, weight, result)
    if sinks is not None:
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

    @property
    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


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


def invariant_tile(head_dim: int, dtype: torch.dtype, *, decode: bool) -> Tile:
    """Of batch-invariant attention. A decode has at least the 64 rows of one wgmma instruction, few of which hold
    queries: it takes less time than the keys. A prompt has twice as many where registers allow: two groups of warps
    that run what a decode's one group runs."""
    if dtype == torch.float32:
        return Tile(32, 16, 8, 2)
    if head_dim > 128:
        return Tile(64, 32, 8, 5)
    return Tile(64, 64, 4, 5) if decode else Tile(128, 64, 8, 5)


def head_pad(head_dim: int) -> int:
    """The columns of a tile: a power of two, and at least the 16 that a matrix instruction sums over."""
    padded: int = max(16, next_power_of_2(head_dim))
    return padded
