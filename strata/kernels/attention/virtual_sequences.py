"""The prompts of a step as virtual sequences: so few queries each that one plan of the library holds any batch of them.

A plan of cuDNN is made for a number of sequences of so many queries at most. Where they begin, how many there are and
how many keys they see is read from device memory, so that one recording serves prompts of any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl

# Queries of a virtual sequence. With twice as many the device is left with fewer programs than it can hold.
QUERIES = 1024
# Prompts of a step for which virtual sequences pay: a plan also runs the programs of those that are not there.
MAX_PROMPTS = 16
MAX_TOKENS = 8192
# No division of so many tokens among so many prompts has more.
VIRTUAL = MAX_TOKENS // QUERIES + MAX_PROMPTS
# Keys that the library reads at once, those past the last one included: it multiplies their values by zero.
KEY_BLOCK = 128
# Elements of a row of the division, so that each row begins at a multiple of 256 bytes.
_WIDTH = -(-(VIRTUAL + 1) // 64) * 64
# Of starts and lengths.
_FIELDS = 6


class Rows(NamedTuple):
    """Elements from one token to the next: of the queries, and of the result.

    values: of a fresh step, the same of the values. None: keys and values are read from pages. keys: the same of its
    keys; None: they lie as the queries do.
    """

    queries: int
    result: int
    values: int | None = None
    keys: int | None = None

    @property
    def key_row(self) -> int:
        return self.queries if self.keys is None else self.keys


class VirtualSequences(NamedTuple):
    """Those of a step, as the library reads them; those past the last have length 0.

    starts: [4, at least VIRTUAL + 1] int32, of each the first element of its queries, of its result, and of its
    prompt's keys and values in a fresh step, else twice of its block table. lengths: [2, at least VIRTUAL] int32, its
    queries, and the keys that the last of them sees; an earlier query sees one less than the one behind it. rows: for
    which the starts are computed.
    """

    starts: Tensor
    lengths: Tensor
    rows: Rows


def as_virtual_sequences(division: Tensor, rows: Rows) -> VirtualSequences:
    """What `virtual_sequences` returned."""
    return VirtualSequences(division[:4], division[4:], rows)


def fresh_rows(new: Sequence[int]) -> int:
    """Rows that a fresh step of prompts of so many tokens needs: the last is continued to a whole block of keys."""
    return sum(new) + -new[-1] % KEY_BLOCK


def _cost(
    offsets: Tensor, lengths: Tensor, bounds: Tensor, tables: Tensor, rows: Rows, page_size: int, *, workload: Workload
) -> Cost:
    return Cost(read=offsets.nbytes + lengths.nbytes, written=4 * _FIELDS * _WIDTH)


def _meta(offsets: Tensor, lengths: Tensor, bounds: Tensor, tables: Tensor, rows: Rows, page_size: int) -> Tensor:
    return lengths.new_empty((_FIELDS, _WIDTH), device="meta")


@operation(_cost, meta=_meta, mutates=("tables",))
def virtual_sequences(
    offsets: Tensor, lengths: Tensor, bounds: Tensor, tables: Tensor, rows: Rows, page_size: int
) -> Tensor:
    """Divide the prompts of a step into `VirtualSequences`: [6, at least VIRTUAL + 1] int32, starts and lengths.

    offsets: [sequences + 1], lengths: [sequences], both int32, as in `Batch` and `PagedKV`; bounds: as in
    `BatchParts`. The prompts are the sequences from bounds[0] on whose length is not 0, at most MAX_PROMPTS with at
    most MAX_TOKENS together. They come in reverse, so that those that see most keys of a prompt are run first.
    tables: [sequences, most_pages] int32, in which the last page of each prompt is repeated up to a block of the
    library's keys, which it reads whole.

    With rows.values the step is fresh: prompts have no tokens from before it, tables are left as they are, and the last
    prompt is continued to a whole block of keys, for which there have to be rows (`fresh_rows`). So no block ends
    behind the last row, and all that is read is of rows that have a result: what padding holds otherwise may not be
    finite. Causality hides the rows that are added from those before them.
    """
    result = torch.zeros((_FIELDS, _WIDTH), dtype=torch.int32, device=offsets.device)
    ends, totals, most_pages = offsets.tolist(), lengths.tolist(), tables.shape[1]
    prompts = [sequence for sequence in range(int(bounds[0]), len(totals)) if totals[sequence]]
    found: list[tuple[int, ...]] = []
    for sequence in prompts:
        total, row, new = totals[sequence], ends[sequence], ends[sequence + 1] - ends[sequence]
        if rows.values is None:
            kept = sequence * most_pages, sequence * most_pages
            last, block = (total - 1) // page_size, max(1, KEY_BLOCK // page_size)
            tables[sequence, last + 1 : (last // block + 1) * block] = tables[sequence, last].clone()
        else:
            kept = row * rows.key_row, row * rows.values
            if sequence == prompts[-1]:
                new += -new % KEY_BLOCK
            total = new
        for first in range(0, new, QUERIES):
            count = min(QUERIES, new - first)
            begin = row + first
            starts = begin * rows.queries, begin * rows.result, *kept
            found.append((*starts, count, total - new + first + count))
    if found:
        result[:, : len(found)] = torch.tensor(found[::-1], dtype=torch.int32).T
    return result


virtual_sequences.implement("torch", "cpu", invariant=True)(virtual_sequences.reference)


@partial(jit, unspecialized=("offsets", "lengths", "bounds", "sequences", "most_pages"))
def virtual_sequences_kernel(
    offsets,
    lengths,
    bounds,
    tables,
    result,
    sequences,
    most_pages,
    query_row,
    result_row,
    key_row,
    value_row,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """One program. SEQUENCES, WIDTH: powers of two, at least `sequences` and all virtual ones. key_row and value_row
    count if FRESH."""
    sequence = tl.arange(0, SEQUENCES)
    held = (sequence >= tl.load(bounds)) & (sequence < sequences)
    total = tl.load(lengths + sequence, mask=held, other=0)
    held &= total > 0
    row = tl.load(offsets + sequence, mask=held, other=0)
    new = tl.load(offsets + sequence + 1, mask=held, other=0) - row
    if FRESH:
        is_last = sequence == tl.max(tl.where(held, sequence, -1), 0)
        new = tl.where(is_last, (new + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK, new)
        total = new
        key_start = row * key_row
        value_start = row * value_row
    else:
        key_start = sequence * most_pages
        value_start = key_start
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
        tl.store(at + 2 * WIDTH, key_start, mask=mine)
        tl.store(at + 3 * WIDTH, value_start, mask=mine)
        tl.store(at + 4 * WIDTH, queries, mask=mine)
        tl.store(at + 5 * WIDTH, total - new + first + queries, mask=mine)
        part += 1
    place = tl.arange(0, WIDTH)
    for field in tl.static_range(6):
        tl.store(result + field * WIDTH + place, tl.zeros((WIDTH,), tl.int32), mask=place >= count)
    if not FRESH and PAGE_SIZE < KEY_BLOCK:
        TABLE_BLOCK: tl.constexpr = KEY_BLOCK // PAGE_SIZE
        last = tl.maximum(total - 1, 0) // PAGE_SIZE
        table = tables + sequence * most_pages
        page = tl.load(table + last, mask=held, other=0)
        for more in tl.static_range(1, TABLE_BLOCK):
            column = last + more
            within = held & (column < most_pages) & (column // TABLE_BLOCK == last // TABLE_BLOCK)
            tl.store(table + column, page, mask=within)


def _at_least(sequences: int) -> int:
    """Far apart, so that steps of any number run what those that are recorded do: sizes of 17, 65, 257 and more."""
    least = 32
    while least < sequences:
        least *= 4
    return least


def _triton(offsets: Tensor, lengths: Tensor, bounds: Tensor, tables: Tensor, rows: Rows, page_size: int) -> Tensor:
    sequences = len(lengths)
    result = torch.empty((_FIELDS, _WIDTH), dtype=torch.int32, device=offsets.device)
    virtual_sequences_kernel[(1,)](
        *(offsets, lengths, bounds, tables, result, sequences, tables.shape[1]),
        *(rows.queries, rows.result, rows.key_row, rows.values or 0),
        WIDTH=_WIDTH,
        QUERIES=QUERIES,
        PAGE_SIZE=page_size,
        KEY_BLOCK=KEY_BLOCK,
        FRESH=rows.values is not None,
        SEQUENCES=_at_least(sequences),
    )
    return result


if HAS_TRITON:
    virtual_sequences.implement("triton", "cuda", invariant=True, kernels=(virtual_sequences_kernel,))(_triton)
