"""The Triton kernel of attention for prompts over the blocks of keys that they keep."""

from __future__ import annotations

from functools import partial

from strata.kernels.attention.sparse.choice_triton import sequence_of
from strata.kernels.attention.varlen_triton import Tile, attend_block, join_sink
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.triton_import import jit, tl


@partial(jit, unspecialized=("starts", "offsets", "lengths", "tables", "sequences", "table_stride", "blocks", "lists"))
def block_sparse_attention_kernel(
    q,
    k,
    v,
    out,
    kept,
    counts,
    starts,
    offsets,
    lengths,
    tables,
    sinks,
    sequences,
    scale,
    q_stride,
    table_stride,
    blocks,
    lists,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [kv_heads, tokens // TILE_QUERIES + sequences]: a tile of queries of one sequence each.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]) of q, the last of its tokens. kept [kv_heads, lists,
    blocks] and counts [kv_heads, lists]: of `kept_blocks_kernel`, for blocks of queries of which tiles are parts. The
    state of a row goes from block to block as in `attention_kernel`.
    """
    kv_head = tl.program_id(0)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = sequence_of(tile, starts, sequences, TILE_QUERIES)
    first = tl.load(starts + sequence)
    new = tl.load(offsets + sequence + 1) - first
    query_start = (tile - first // TILE_QUERIES - sequence) * TILE_QUERIES
    if query_start >= new:
        return
    total = tl.load(lengths + sequence)

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
    k_stride = tl.num_programs(0) * HEAD_DIM
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    table = tables + sequence * table_stride
    own = kv_head.to(tl.int64) * lists + first // BLOCK + sequence + query_start // BLOCK
    listed = kept + own * blocks
    # From the first block that not all rows see whole on all are kept, to the last that any query of the list sees.
    partly = (lowest + 1) // BLOCK
    list_end = tl.minimum(query_start // BLOCK * BLOCK + BLOCK, new)
    whole = tl.load(counts + own) - ((total - new + list_end - 1) // BLOCK - partly + 1)

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    PER: tl.constexpr = BLOCK // BLOCK_N
    block = tl.load(listed) * BLOCK
    for part in range(whole * PER):
        start = block + part % PER * BLOCK_N
        # Looked up a part ahead: loads that wait for a lookup could not be pipelined.
        block = tl.load(listed + tl.minimum((part + 1) // PER, blocks - 1)) * BLOCK
        maximum, weight, result = attend_block(
            queries, at, maximum, weight, result, start, total, k, v, None, None,
            first, table, scale, k_stride, k_stride, False, 0, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    for start in range(partly * BLOCK, end, BLOCK_N):
        maximum, weight, result = attend_block(
            queries, at, maximum, weight, result, start, total, k, v, None, None,
            first, table, scale, k_stride, k_stride, True, 0, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    if SINKS:
        maximum, weight, result = join_sink(maximum, weight, result, sinks, head, held)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    HEADS = tl.num_programs(0) * GROUP
    target = out + ((token * HEADS + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


def tile_queries(tile: Tile, group: int, block: int) -> int:
    """Queries of a tile: a part of a block of them."""
    return min(block, tile.rows // next_power_of_2(group))
