"""Which keys the queries of one step read on a CPU: worked out once on the host, used by every layer's attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Bytes of keys and values that are staged together: they stay in the second-level cache between the copy and the use.
TILE_BYTES = 4 << 20
# Padding (bytes of keys and values) that costs less than handling one more group of sequences.
PADDING_BYTES = 512 << 10
# The keys of a padded group are a multiple of this: bf16 products of odd lengths take a fifth longer.
SPAN_MULTIPLE = 16
# Query rows of a prompt that are handled together, which bounds the mask.
QUERY_ROWS = 512


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length with one new token each.

    rows: their tokens in the batch. slots: [sequences * span] int32, the pool slots of the keys that they see, filled
    up with the first of them. mask: [sequences, 1, 1, span], 0 or -inf; None when all see `span` keys.
    """

    rows: slice | Tensor
    sequences: int
    slots: slice | Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class QueryTile:
    """Neighbouring queries of one sequence. keys: the range of the staged keys that they see; mask: [rows, keys], None
    when the tile is the whole sequence, which is plainly causal."""

    rows: slice
    keys: slice
    mask: Tensor | None


@dataclass(frozen=True)
class PromptChunk:
    """Several new tokens of one sequence. slots: the pool slots of the keys that they see; None when those are the
    batch's own keys, because the sequence starts here."""

    rows: slice
    slots: slice | Tensor | None
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True)
class Schedule:
    """All sequences of a step under one window. padded: whether rows exist that nothing computes."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]
    padded: bool


@dataclass(frozen=True)
class AttentionPlan:
    """A schedule for each window that the model's layers use.

    used: [pages] int64; of pools in 8 bits, the pages that the batch has and that are widened, among which slots count;
    None: slots are those of the pools.
    """

    schedules: dict[int | None, Schedule]
    used: Tensor | None = None


def schedule(
    offsets: list[int],
    lengths: list[int],
    tables: Tensor,
    page_size: int,
    token_bytes: int,
    dtype: torch.dtype,
    window: int | None,
) -> Schedule:
    """Divide a step into work.

    offsets, lengths, tables, page_size: as in `Batch` and `PagedKV`. token_bytes: bytes of one token's key and value in
    one layer. dtype: that keys are read in. window: as in `attention`.
    """
    decoding, chunks, padded = [], [], False
    for sequence, total in enumerate(lengths):
        first, last = offsets[sequence], offsets[sequence + 1]
        if total < last - first or total == 0:
            padded |= last > first
        elif last - first == 1:
            decoding.append(sequence)
        elif last > first:
            chunks.append(_chunk(first, last, total, tables[sequence], page_size, dtype, window))
    groups = tuple(
        _group(group, offsets, lengths, tables, page_size, dtype, window)
        for group in _similar(decoding, lengths, token_bytes, window)
    )
    return Schedule(groups, tuple(chunks), padded)


def _similar(decoding: list[int], lengths: list[int], token_bytes: int, window: int | None) -> Iterator[list[int]]:
    """Divide decoding sequences into groups that fit a tile and waste little on padding."""
    spans = {s: lengths[s] if window is None else min(lengths[s], window) for s in decoding}
    group: list[int] = []
    padding = 0
    for sequence in sorted(decoding, key=lambda s: -spans[s]):
        if group:
            span = spans[group[0]]
            padding += (span - spans[sequence]) * token_bytes
            if padding > PADDING_BYTES or (len(group) + 1) * (span + SPAN_MULTIPLE) * token_bytes > TILE_BYTES:
                yield sorted(group)
                group, padding = [], 0
        group.append(sequence)
    if group:
        yield sorted(group)


def _group(
    group: list[int],
    offsets: list[int],
    lengths: list[int],
    tables: Tensor,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> DecodeGroup:
    rows = [offsets[sequence] for sequence in group]
    contiguous = rows[-1] - rows[0] == len(rows) - 1
    index = slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows)
    if len(group) == 1:
        total = lengths[group[0]]
        first = 0 if window is None else max(0, total - window)
        return DecodeGroup(index, 1, _slots(tables[group[0]], first, total, page_size), None)
    totals = torch.tensor([lengths[sequence] for sequence in group], dtype=torch.int32)[:, None]
    firsts = torch.zeros_like(totals) if window is None else (totals - window).clamp_(min=0)
    span = -(-int((totals - firsts).max()) // SPAN_MULTIPLE) * SPAN_MULTIPLE
    positions = firsts + torch.arange(span, dtype=torch.int32)
    beyond = positions >= totals
    positions = torch.where(beyond, firsts, positions)
    pages = tables[torch.tensor(group)].gather(1, (positions // page_size).long())
    mask = None
    if bool(beyond.any()):
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]
    return DecodeGroup(index, len(group), (pages * page_size + positions % page_size).flatten(), mask)


def _chunk(
    first: int, last: int, total: int, table: Tensor, page_size: int, dtype: torch.dtype, window: int | None
) -> PromptChunk:
    new = last - first
    rows = slice(first, last)
    fresh = new == total
    if fresh and (window is None or window >= total):
        return PromptChunk(rows, None, (QueryTile(slice(0, new), slice(0, new), None),))
    seen = 0 if window is None else max(0, total - new + 1 - window)  # the first position that any query sees
    tiles = []
    for start in range(0, new, QUERY_ROWS):
        stop = min(start + QUERY_ROWS, new)
        low, high = total - new + start, total - new + stop
        begin = 0 if window is None else max(0, low + 1 - window)
        query, key = torch.arange(low, high)[:, None], torch.arange(begin, high)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        tiles.append(QueryTile(slice(start, stop), slice(begin - seen, high - seen), mask))
    return PromptChunk(rows, None if fresh else _slots(table, seen, total, page_size), tuple(tiles))


def _slots(table: Tensor, first: int, last: int, page_size: int) -> slice | Tensor:
    """The pool slots of positions first to last of one sequence; a slice when its pages lie in a row."""
    low, high = first // page_size, -(-last // page_size)
    pages = table[low:high]
    begin = int(pages[0]) * page_size + first % page_size
    if len(pages) == 1 or bool((pages[1:] - pages[:-1] == 1).all()):
        return slice(begin, begin + last - first)
    slots = (pages[:, None] * page_size + torch.arange(page_size, dtype=torch.int32)).flatten()
    return slots[first - low * page_size : last - low * page_size]


def plan(
    offsets: Tensor,
    lengths: Tensor,
    tables: Tensor,
    keys: Tensor,
    dtype: torch.dtype,
    windows: Iterable[int | None] = (None,),
    used: Tensor | None = None,
) -> AttentionPlan:
    """The plan of a step from the tensors of its batch, all on the CPU; `keys` is the pool of one layer, which is read
    in `dtype`. used: see `AttentionPlan`."""
    token_bytes = 2 * keys[0, 0].numel() * dtype.itemsize
    starts, totals = offsets.tolist(), lengths.tolist()
    schedules = {w: schedule(starts, totals, tables, keys.shape[1], token_bytes, dtype, w) for w in set(windows)}
    return AttentionPlan(schedules, used)
