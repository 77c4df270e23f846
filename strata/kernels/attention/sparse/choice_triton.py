"""The Triton kernels that choose blocks of keys for prompts: pooled scores, and the fewest that hold the share."""

from __future__ import annotations

from functools import partial

import torch

from strata.kernels.attention.softmax_triton import queries_of_tile
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.triton_import import jit, tl


@jit
def in_blocks(new, total, min_keys):
    """Whether a sequence attends to the blocks that it keeps; else it sees all keys."""
    return (new > 1) & (total >= min_keys)


@partial(jit, unspecialized=("starts", "offsets", "lengths", "tables", "sequences", "table_stride", "rows", "blocks"))
def pooled_scores_kernel(
    q,
    k,
    logs,
    starts,
    offsets,
    lengths,
    tables,
    sequences,
    scale,
    q_stride,
    table_stride,
    rows,
    blocks,
    min_keys,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs [tiles of keys, kv_heads, tiles of queries]: ROWS stretches of queries, of all heads of a group, against
    COLUMNS stretches of keys. Of sequence s the queries in rows [starts[s], offsets[s + 1]) of q.

    logs [kv_heads, rows, GROUP, blocks] float32: of each stretch of queries and block of keys the logarithm, to the
    base two, of its part of the softmax's sum. Those of sequence s begin with row starts[s] // STRIDE + s. Of sequences
    that see all keys, and of blocks past the last that is seen, none are written.
    """
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    TILE_ROWS: tl.constexpr = ROWS // GROUP
    TILE_QUERIES: tl.constexpr = TILE_ROWS * STRIDE
    sequence, first, new, query_start = queries_of_tile(tile, starts, offsets, 0, sequences, 0, TILE_QUERIES)
    if query_start >= new:
        return
    total = tl.load(lengths + sequence)
    key_start = tl.program_id(0) * COLUMNS * STRIDE
    if not in_blocks(new, total, min_keys):
        return
    if key_start >= total - new + tl.minimum(query_start + TILE_QUERIES, new):
        return
    row = tl.arange(0, ROWS)
    stretch = query_start // STRIDE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TILE_ROWS * GROUP) & (stretch * STRIDE < new)
    columns = tl.arange(0, HEAD_PAD)
    inside = columns < HEAD_DIM
    position = key_start + tl.arange(0, COLUMNS) * STRIDE
    table = tables + sequence * table_stride
    k += kv_head * HEAD_DIM
    k_stride = tl.num_programs(1) * HEAD_DIM
    if PAGE_SIZE % STRIDE == 0:  # a stretch of keys lies in one page
        page = tl.load(table + position // PAGE_SIZE, mask=position < total, other=0).to(tl.int64)
        slots = page * PAGE_SIZE + position % PAGE_SIZE
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for back in range(STRIDE):
        query = stretch * STRIDE + (STRIDE - 1 - back)
        token = (first + query).to(tl.int64)
        q_mask = (is_row & (query < new))[:, None] & inside[None, :]
        queries = tl.load(q + (token * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=q_mask, other=0.0)
        there = position + back < total
        if PAGE_SIZE % STRIDE == 0:
            own = slots + back
        else:
            own_page = tl.load(table + (position + back) // PAGE_SIZE, mask=there, other=0).to(tl.int64)
            own = own_page * PAGE_SIZE + (position + back) % PAGE_SIZE
        k_mask = inside[:, None] & there[None, :]
        keys = tl.load(k + own[None, :] * k_stride + columns[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(queries, keys, scores, input_precision="ieee")
    last = total - new + tl.minimum((stretch + 1) * STRIDE, new) - 1
    visible = (position[None, :] <= last[:, None]) & (position < total)[None, :]
    scores = tl.where(visible, scores * scale, float("-inf"))
    PER: tl.constexpr = BLOCK // STRIDE
    parts = tl.reshape(scores, (ROWS, COLUMNS // PER, PER))
    largest = tl.max(parts, 2)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.sum(tl.exp2(parts - shift[:, :, None]), 2)
    found = tl.where(largest == float("-inf"), float("-inf"), shift + tl.log2(tl.maximum(sums, 1.0)))
    block = key_start // BLOCK + tl.arange(0, COLUMNS // PER)
    line = (kv_head.to(tl.int64) * rows + first // STRIDE + sequence + stretch) * GROUP + row % GROUP
    tl.store(logs + line[:, None] * blocks + block[None, :], found, mask=is_row[:, None] & (block < blocks)[None, :])


@partial(jit, unspecialized=("starts", "offsets", "lengths", "sequences", "rows", "blocks"))
def chosen_blocks_kernel(
    logs,
    kept,
    counts,
    starts,
    offsets,
    lengths,
    sequences,
    rows,
    blocks,
    share,
    min_keys,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Programs [blocks of queries, kv_heads]: which blocks of keys a block of queries keeps, ascending.

    logs: of `pooled_scores_kernel`. kept [kv_heads, blocks of queries, blocks] int32, counts [kv_heads, blocks of
    queries] int32; those of sequence s begin with starts[s] // BLOCK + s. Of sequences that see all keys all
    blocks are kept. BLOCKS: a power of two from `blocks` on.
    """
    at = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence, first, new, query_start = queries_of_tile(at, starts, offsets, 0, sequences, 0, BLOCK)
    if query_start >= new:
        return
    total = tl.load(lengths + sequence)
    end = tl.minimum(query_start + BLOCK, new)
    lowest = total - new + query_start
    block = tl.arange(0, BLOCKS)
    seen = block <= (total - new + end - 1) // BLOCK
    mass = tl.zeros((BLOCKS,), tl.float32)
    divided = in_blocks(new, total, min_keys)
    if divided:
        line = (kv_head * rows + first // STRIDE + sequence + query_start // STRIDE) * GROUP
        for head in range(GROUP):
            of_head = tl.zeros((BLOCKS,), tl.float32)
            for stretch in range((end - query_start + STRIDE - 1) // STRIDE):
                own = logs + (line + stretch * GROUP + head) * blocks
                # What later stretches alone see may lie past what the tile of this one has written.
                last = (lowest + tl.minimum((stretch + 1) * STRIDE, end - query_start) - 1) // BLOCK
                found = tl.load(own + block, mask=block <= last, other=float("-inf"))
                weights = tl.exp2(found - tl.max(found, 0))
                of_head += weights / tl.sum(weights, 0)
            mass = tl.maximum(mass, of_head)
    always = seen & ((block == 0) | (block >= lowest // BLOCK - LOCAL))
    # The bits of the largest weight, which is not negative, such that blocks of it or more hold what is missing.
    free = seen & ~always
    missing = share * tl.sum(mass, 0) - tl.sum(tl.where(always, mass, 0.0), 0)
    bits = mass.to(tl.int32, bitcast=True)
    low = 0
    high = 0x7F800000
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(free & (bits >= middle), mass, 0.0), 0) >= missing
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    all_of_them = ~divided | (share >= 1.0)
    is_kept = always | (free & ((bits >= low) | all_of_them))
    ones = is_kept.to(tl.int32)
    place = tl.cumsum(ones, 0) - ones
    row = kv_head * tl.num_programs(0) + at
    tl.store(kept + row * blocks + place, block, mask=is_kept)
    tl.store(counts + row, tl.sum(ones, 0))


# The most keys of a block: a program divides its stretches of keys into whole blocks.
MAX_BLOCK = 2048


def pooled_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """rows, keys: stretches of queries, of all heads of a group, and of keys that a program multiplies."""
    if dtype == torch.float32:
        return Tile(32, 128, 8, 2)
    return Tile(64, 128, 8, 2) if head_dim > 128 else Tile(128, 128, 8, 3)


def choice_warps(padded_blocks: int) -> int:
    """Of a program that chooses among so many blocks, which it has in registers: so many that none spills, whichever
    Triton compiles it."""
    return 4 if padded_blocks < 512 else 8 if padded_blocks < 4096 else 16
