"""Attention on a CPU whose bits depend on nothing but the sequence: products of one shape over aligned blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from strata.kernels.attention.spec import AttentionCall
from strata.kernels.state.paged import PagedKV

# Keys of a block. Blocks and tiles of queries start at multiples of their size, counted from a sequence's first token.
BLOCK_KEYS = 128
# Rows of a tile: queries times the query heads of a group, if there are not more of those.
TILE_ROWS = 16
# Bytes of keys and values in float32 that are staged together.
STAGED_BYTES = 4 << 20


@dataclass(frozen=True)
class Tiles:
    """Aligned runs of queries, those that end latest first.

    tokens: [tiles, queries] index in the batch, 0 where the tile holds no query. held: [tiles, queries].
    starts: [tiles] position of the first query. totals: [tiles] keys of the sequence.
    sequences: [tiles]. last: for each tile the last block of keys that it sees; first: the first one.
    """

    tokens: Tensor
    held: Tensor
    starts: Tensor
    totals: Tensor
    sequences: Tensor
    first: list[int]
    last: list[int]


def _tiles(offsets: list[int], lengths: list[int], queries: int, window: int | None) -> Tiles:
    rows = []
    for sequence, ((begin, end), total) in enumerate(zip(pairwise(offsets), lengths, strict=True)):
        low = total - (end - begin)
        if low < 0:
            continue
        for start in range(low // queries * queries, total, queries):
            rows.append((min(start + queries, total) - 1, sequence, start, total, begin - low, low))
    rows.sort(key=lambda row: -row[0])
    last = [row[0] // BLOCK_KEYS for row in rows]
    first = [0 if window is None else max(0, max(row[2], row[5]) + 1 - window) // BLOCK_KEYS for row in rows]
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 6).unbind(1)
    _, sequences, starts, totals, shifts, lows = columns
    at = starts[:, None] + torch.arange(queries)
    held = (at >= lows[:, None]) & (at < totals[:, None])
    tokens = torch.where(held, at + shifts[:, None], 0)
    return Tiles(tokens, held, starts, totals, sequences, first, last)


def attend_exact(call: AttentionCall) -> Tensor:
    """Softmax in one pass over blocks of keys, in float32 (float64 for float64 input).

    A library's product may sum in another order when its shape changes, so every product here is one of
    [TILE_ROWS, head_dim] with [head_dim, BLOCK_KEYS] or of [TILE_ROWS, BLOCK_KEYS] with [BLOCK_KEYS, head_dim], and a
    query has the same row of a tile and the same blocks of keys whatever the batch is. A block of which a row sees
    nothing leaves the row's state as it is, bit for bit.
    """
    q, k, v, batch, spec, sinks = call
    offsets, pages, window = batch.offsets, batch.pages, spec.window
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    queries = max(1, TILE_ROWS // group)
    bounds = offsets.tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)] if pages is None else pages.lengths.tolist()
    tiles = _tiles(bounds, lengths, queries, window)
    out = q.new_zeros(q.shape)
    most = max(1, STAGED_BYTES // (8 * BLOCK_KEYS * kv_heads * head_dim))
    for low in range(0, len(tiles.last), most):
        part = slice(low, low + most)
        held, tokens = tiles.held[part], tiles.tokens[part]
        state = _start(q, tokens, kv_heads, spec.scale)
        for block in range(min(tiles.first[part]), tiles.last[low] + 1):
            active = sum(last >= block for last in tiles.last[part])
            positions = block * BLOCK_KEYS + torch.arange(BLOCK_KEYS)
            slots = _slots(tiles, slice(low, low + active), positions, offsets, pages)
            at = tiles.starts[low : low + active, None] + torch.arange(queries)
            hidden = positions > at[:, :, None]
            if window is not None:
                hidden |= positions <= at[:, :, None] - window
            if pages is None:
                keys, values = k.index_select(0, slots), v.index_select(0, slots)
            else:
                keys, values = pages.rows_at(spec.layer, slots, q.dtype)
            _join(state, hidden, keys, values)
        if sinks is not None:
            _join_sinks(state, sinks.view(kv_heads, 1, group).expand(-1, queries, -1).reshape(kv_heads, -1))
        result = (state.result / state.weight).view(len(tokens), kv_heads, queries, group, head_dim)
        out[tokens[held]] = result.transpose(1, 2)[held].flatten(1, 2).to(q.dtype)
    return out


def _slots(tiles: Tiles, part: slice, positions: Tensor, offsets: Tensor, pages: PagedKV | None) -> Tensor:
    """Where the keys at `positions` lie for each tile, flattened; the last of the sequence stands for those beyond it,
    and for those in front of the first block that the tile sees, whose pages may be another's by now."""
    sequences, totals = tiles.sequences[part], tiles.totals[part, None]
    firsts = torch.tensor(tiles.first[part])[:, None] * BLOCK_KEYS
    positions = torch.where((positions < totals) & (positions >= firsts), positions, totals - 1)
    if pages is None:
        return (offsets[sequences][:, None] + positions).flatten()
    table = pages.tables[sequences].gather(1, positions // pages.page_size)
    return (table * pages.page_size + positions % pages.page_size).flatten()


@dataclass(frozen=True)
class State:
    """The running softmax of some tiles, a matrix for each tile and KV head: queries and result [matrices, rows,
    head_dim], maximum and weight [matrices, rows, 1]; updated in place."""

    queries: Tensor
    maximum: Tensor
    weight: Tensor
    result: Tensor


def _start(q: Tensor, tokens: Tensor, kv_heads: int, scale: float) -> State:
    tiles, queries = tokens.shape
    grouped = q.index_select(0, tokens.flatten()).view(tiles, queries, kv_heads, -1, q.shape[2])
    precision = torch.promote_types(q.dtype, torch.float32)
    rows = grouped.transpose(1, 2).flatten(2, 3).flatten(0, 1).to(precision) * scale
    shape = (*rows.shape[:2], 1)
    return State(rows, rows.new_full(shape, -torch.inf), rows.new_zeros(shape), torch.zeros_like(rows))


def _join(state: State, hidden: Tensor, keys: Tensor, values: Tensor) -> None:
    """Add a block of keys to the first tiles. hidden: [tiles, queries, keys]; keys, values: [tiles * keys, kv_heads,
    head_dim]."""
    tiles, queries, block = hidden.shape
    kv_heads, head_dim = keys.shape[1:]
    count = tiles * kv_heads

    def matrices(x: Tensor) -> Tensor:
        by_head = x.view(tiles, block, kv_heads, head_dim).transpose(1, 2)
        return by_head.to(state.queries.dtype).reshape(count, block, head_dim)

    rows, maximum, weight, result = (x[:count] for x in (state.queries, state.maximum, state.weight, state.result))
    scores = torch.bmm(rows, matrices(keys).transpose(1, 2))
    scores.view(tiles, kv_heads, queries, -1, block).masked_fill_(hidden[:, None, :, None], -torch.inf)
    largest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
    # A row that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = scores.sub_(shift).exp_()
    shrink = (maximum - shift).exp_()
    weight.mul_(shrink).add_(weights.sum(-1, keepdim=True))
    result.mul_(shrink).add_(torch.bmm(weights, matrices(values)))
    maximum.copy_(largest)


def _join_sinks(state: State, sinks: Tensor) -> None:
    """Add a score without a value to every row. sinks: [kv_heads, rows]."""
    scores = sinks.to(state.maximum.dtype).repeat(len(state.maximum) // len(sinks), 1)[..., None]
    largest = torch.maximum(state.maximum, scores)
    shrink = (state.maximum - largest).exp_()
    state.weight.mul_(shrink).add_((scores - largest).exp_())
    state.result.mul_(shrink)
    state.maximum.copy_(largest)
