"""The prompts of a step as query chunks: so few queries each that one plan of the library holds any batch of them.

A plan of cuDNN is made for a number of sequences of so many queries at most. Where they begin, how many there are and
how many keys they see is read from device memory, so that one CUDA graph serves prompts of any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl

# Queries of a chunk. With twice as many the device is left with fewer programs than it can hold.
QUERIES = 1024
# Prompts of a step for which query chunks pay: a plan also runs the programs of those that are not there.
MAX_PROMPTS = 16
MAX_TOKENS = 8192
# No division of so many tokens among so many prompts has more.
MAX_QUERY_CHUNKS = MAX_TOKENS // QUERIES + MAX_PROMPTS
# Keys that the library reads at once, those past the last one included: it multiplies their values by zero.
KEY_BLOCK = 128
# Keys of all prompts of a step that are gathered for the library, more only where one prompt may have more: 512 MiB of
# a layer of 8B.
MAX_GATHERED = 1 << 17
# Elements of a row of the division, so that each row begins at a multiple of 256 bytes.
_WIDTH = -(-(MAX_QUERY_CHUNKS + 1) // 64) * 64
# Of starts, lengths and prompts.
_FIELDS = 8


class Rows(NamedTuple):
    """Elements from one token to the next: of the queries, of the result, and of keys and values.

    pure_prefill: of steps whose prompts have no tokens from before, so that keys and values are those of the step's own
    tokens. Otherwise they are gathered from pages, each prompt's from a whole block of keys on.
    """

    queries: int
    result: int
    keys: int
    values: int
    pure_prefill: bool = False


class QueryChunks(NamedTuple):
    """Those of a step, as the library reads them; those past the last have length 0.

    starts: [4, at least MAX_QUERY_CHUNKS + 1] int32, of each the first element of its queries, of its result, and of
    its prompt's keys and values. lengths: [2, at least MAX_QUERY_CHUNKS] int32, its queries, and the keys that the last
    of them sees; an earlier query sees one less than the one behind it. prompts: [2, at least MAX_PROMPTS] int32, where
    keys are gathered: of each prompt the blocks of keys up to its end, and its sequence; behind the last as many blocks
    and 0.
    rows: for which the starts are computed.
    """

    starts: Tensor
    lengths: Tensor
    prompts: Tensor
    rows: Rows


def as_query_chunks(division: Tensor, rows: Rows) -> QueryChunks:
    """What `query_chunks` returned."""
    return QueryChunks(division[:4], division[4:6], division[6:], rows)


def pure_prefill_rows(new: Sequence[int]) -> int:
    """Rows that a pure prefill of prompts of so many tokens needs, of which the last fills a whole block of keys."""
    return sum(new) + -new[-1] % KEY_BLOCK


def in_blocks(keys: int) -> int:
    """So many keys, continued to a whole block."""
    return keys + -keys % KEY_BLOCK


def keys_in_blocks(totals: Sequence[int]) -> int:
    """Of prompts that see so many keys, each in whole blocks."""
    return sum(in_blocks(total) for total in totals)


def gathered_keys(longest: int, row: int = 1) -> int:
    """Keys of prompts, each in whole blocks, that a step has room for where cuDNN attends to them: always those of one
    that is as long as a sequence may be. row: elements of each, of which the starts count."""
    most = in_blocks(longest)
    return min(max(most, MAX_GATHERED), MAX_PROMPTS * most, ((1 << 31) - 1) // row // KEY_BLOCK * KEY_BLOCK)


def _cost(offsets: Tensor, lengths: Tensor, bounds: Tensor, rows: Rows, *, workload: Workload) -> Cost:
    return Cost(read=offsets.nbytes + lengths.nbytes, written=4 * _FIELDS * _WIDTH)


def _meta(offsets: Tensor, lengths: Tensor, bounds: Tensor, rows: Rows) -> Tensor:
    return lengths.new_empty((_FIELDS, _WIDTH), device="meta")


@operation(_cost, meta=_meta)
def query_chunks(offsets: Tensor, lengths: Tensor, bounds: Tensor, rows: Rows) -> Tensor:
    """Divide the prompts of a step into `QueryChunks`: [8, at least MAX_QUERY_CHUNKS + 1] int32: starts, lengths,
    prompts.

    offsets: [sequences + 1], lengths: [sequences], both int32, as in `Batch` and `PagedKV`; bounds: as in
    `BatchSplit`. The prompts are the sequences from bounds[0] on whose length is not 0, at most MAX_PROMPTS with at
    most MAX_TOKENS together. They come in reverse, so that those that see most keys of a prompt are run first.

    In a pure prefill step prompts have no tokens from before it, and the last is continued to a whole block of keys,
    for which there have to be rows (`pure_prefill_rows`). So no block ends behind the last row, and all that is read is
    of rows that have a result: what padding holds otherwise may not be finite. Causality hides the rows that are added
    from those before them.
    """
    result = torch.zeros((_FIELDS, _WIDTH), dtype=torch.int32, device=offsets.device)
    ends, totals = offsets.tolist(), lengths.tolist()
    prompts = [sequence for sequence in range(int(bounds[0]), len(totals)) if totals[sequence]]
    found: list[tuple[int, ...]] = []
    gathered = 0
    for place, sequence in enumerate(prompts):
        total, row, new = totals[sequence], ends[sequence], ends[sequence + 1] - ends[sequence]
        first_key = gathered
        if rows.pure_prefill:
            first_key = row
            if sequence == prompts[-1]:
                new = in_blocks(new)
            total = new
        gathered += in_blocks(total)
        result[6, place:], result[7, place] = gathered // KEY_BLOCK, sequence
        for first in range(0, new, QUERIES):
            count = min(QUERIES, new - first)
            begin = row + first
            starts = begin * rows.queries, begin * rows.result, first_key * rows.keys, first_key * rows.values
            found.append((*starts, count, total - new + first + count))
    if found:
        result[:6, : len(found)] = torch.tensor(found[::-1], dtype=torch.int32).T
    return result


query_chunks.by_definition("cpu", invariant=True)


@partial(jit, unspecialized=("offsets", "lengths", "bounds", "sequences"))
def query_chunks_kernel(
    offsets,
    lengths,
    bounds,
    result,
    sequences,
    query_row,
    result_row,
    key_row,
    value_row,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PURE_PREFILL: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """One program. SEQUENCES, WIDTH: powers of two, at least `sequences` and all query chunks."""
    sequence = tl.arange(0, SEQUENCES)
    held = (sequence >= tl.load(bounds)) & (sequence < sequences)
    total = tl.load(lengths + sequence, mask=held, other=0)
    held &= total > 0
    row = tl.load(offsets + sequence, mask=held, other=0)
    new = tl.load(offsets + sequence + 1, mask=held, other=0) - row
    if PURE_PREFILL:
        is_last = sequence == tl.max(tl.where(held, sequence, -1), 0)
        new = tl.where(is_last, (new + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK, new)
        total = new
    blocks = (total + KEY_BLOCK - 1) // KEY_BLOCK
    block_ends = tl.cumsum(blocks, 0)
    first_key = row if PURE_PREFILL else (block_ends - blocks) * KEY_BLOCK
    parts = (new + QUERIES - 1) // QUERIES
    ends = tl.cumsum(parts, 0)
    count = tl.sum(parts, 0)
    most = tl.max(parts, 0)
    part = 0
    while part < most:
        mine = held & (part < parts)
        at = result + count - 1 - (ends - parts + part)
        first = part * QUERIES
        queries = tl.minimum(new - first, QUERIES)
        tl.store(at, (row + first) * query_row, mask=mine)
        tl.store(at + WIDTH, (row + first) * result_row, mask=mine)
        tl.store(at + 2 * WIDTH, first_key * key_row, mask=mine)
        tl.store(at + 3 * WIDTH, first_key * value_row, mask=mine)
        tl.store(at + 4 * WIDTH, queries, mask=mine)
        tl.store(at + 5 * WIDTH, total - new + first + queries, mask=mine)
        part += 1
    place = tl.arange(0, WIDTH)
    for field in tl.static_range(6):
        tl.store(result + field * WIDTH + place, tl.zeros((WIDTH,), tl.int32), mask=place >= count)
    prompt = tl.cumsum(held.to(tl.int32), 0) - 1
    prompts = tl.sum(held.to(tl.int32), 0)
    tl.store(result + 6 * WIDTH + prompt, block_ends, mask=held)
    tl.store(result + 7 * WIDTH + prompt, sequence, mask=held)
    tl.store(result + 6 * WIDTH + place, tl.zeros((WIDTH,), tl.int32) + tl.sum(blocks, 0), mask=place >= prompts)
    tl.store(result + 7 * WIDTH + place, tl.zeros((WIDTH,), tl.int32), mask=place >= prompts)


def _at_least(sequences: int) -> int:
    """Far apart, so that steps of any number run what those that are captured do: sizes of 17, 65, 257 and more."""
    least = 32
    while least < sequences:
        least *= 4
    return least


def launched(offsets: Tensor, lengths: Tensor, bounds: Tensor, rows: Rows) -> Tensor:
    sequences = len(lengths)
    result = torch.empty((_FIELDS, _WIDTH), dtype=torch.int32, device=offsets.device)
    query_chunks_kernel[(1,)](
        *(offsets, lengths, bounds, result, sequences),
        *(rows.queries, rows.result, rows.keys, rows.values),
        WIDTH=_WIDTH,
        QUERIES=QUERIES,
        KEY_BLOCK=KEY_BLOCK,
        PURE_PREFILL=rows.pure_prefill,
        SEQUENCES=_at_least(sequences),
    )
    return result


query_chunks.in_triton(launched, invariant=True, kernels=(query_chunks_kernel,))
