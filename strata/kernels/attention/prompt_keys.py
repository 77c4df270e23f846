"""Keys and values of a step's prompts, gathered from pages into rows of their own, which cuDNN attends to.

Over pages of 16 tokens cuDNN attends a sixth slower than over rows side by side (8,192 tokens of 8B behind 8,192, one
H200); to bring them there takes a hundredth of that attention, of 2,048 tokens' a twenty-seventh (docs/performance.md).
What lies behind a prompt's last token is zero up to a whole block of keys: the library multiplies it by zero, and what
is not finite would stay so.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from strata.kernels.attention.query_chunks import KEY_BLOCK, MAX_PROMPTS, QueryChunks, gathered_keys
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import jit, tl

# As many programs as an H200 runs at once with 8 warps each; each takes every so manyth piece of so many tokens.
_PROGRAMS, _WARPS, _PIECE = 528, 8, 16
_MAX_COLUMNS = 1024


def prompt_keys_bytes(keys: int, row: int, itemsize: int) -> int:
    """What keys and values of so many tokens take, of a layer. row: elements of a token's keys."""
    return 2 * keys * row * itemsize


# What stands in a step's buffer begins at any address.
@partial(jit, unspecialized=("tables", "lengths", "page_limit"))
def gather_prompt_keys_kernel(
    keys,
    values,
    tables,
    lengths,
    ends,
    sequences,
    out_keys,
    out_values,
    page_limit,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PROMPTS: tl.constexpr,
):
    """ROW: elements of a token, of which so many COLUMNS, a power of two, are copied at a time."""
    place = tl.arange(0, PROMPTS)
    end = tl.load(ends + place)
    sequence_of = tl.load(sequences + place)
    pieces = tl.max(end, 0) * (KEY_BLOCK // PIECE)
    piece = tl.program_id(0)
    while piece < pieces:
        before = end <= piece // (KEY_BLOCK // PIECE)
        prompt = tl.sum(before.to(tl.int32), 0)
        sequence = tl.sum(tl.where(place == prompt, sequence_of, 0), 0)
        token = piece * PIECE - tl.max(tl.where(before, end, 0), 0) * KEY_BLOCK
        length = tl.load(lengths + sequence)
        held = token < length
        page = tl.load(tables + sequence.to(tl.int64) * page_limit + token // PAGE_SIZE, mask=held, other=0)
        row = tl.arange(0, PIECE)[:, None]
        source = (page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE) * ROW
        target = piece.to(tl.int64) * PIECE * ROW
        for first in tl.static_range(0, ROW, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            element = row * ROW + column
            within = (row < PIECE) & (column < ROW)
            there = within & (token + row < length)
            tl.store(out_keys + target + element, tl.load(keys + source + element, mask=there, other=0.0), mask=within)
            tl.store(
                out_values + target + element, tl.load(values + source + element, mask=there, other=0.0), mask=within
            )
        piece += tl.num_programs(0)


def gather_prompt_keys(pages: PagedKV, layer: int, chunks: QueryChunks, longest: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, [`gathered_keys` rows, kv_heads, head_dim], where `chunks` says that they begin; the
    rows behind the last prompt are not written. longest: tokens that a sequence may have."""
    keys, values = pages.keys[layer], pages.values[layer]
    row = keys.shape[2] * keys.shape[3]
    found = [keys.new_empty((gathered_keys(longest, row), *keys.shape[2:])) for _ in range(2)]
    gather_prompt_keys_kernel[(_PROGRAMS,)](
        keys,
        values,
        pages.tables,
        pages.lengths,
        chunks.prompts[0],
        chunks.prompts[1],
        *found,
        pages.tables.shape[1],
        ROW=row,
        COLUMNS=_columns(row),
        PAGE_SIZE=pages.page_size,
        KEY_BLOCK=KEY_BLOCK,
        PIECE=_PIECE,
        PROMPTS=MAX_PROMPTS,
        num_warps=_WARPS,
    )
    return found[0], found[1]


def reference(pages: PagedKV, layer: int, chunks: QueryChunks, longest: int) -> tuple[Tensor, Tensor]:
    """The same by torch, all rows of the result written."""
    keys, values = pages.keys[layer], pages.values[layer]
    size, page_size = gathered_keys(longest, keys.shape[2] * keys.shape[3]), pages.page_size
    found = [keys.new_zeros((size, *keys.shape[2:])) for _ in range(2)]
    begin = 0
    for end, sequence in zip(*chunks.prompts[:, :MAX_PROMPTS].tolist(), strict=True):
        first, begin = begin * KEY_BLOCK, end
        length = int(pages.lengths[sequence]) if end * KEY_BLOCK > first else 0
        used = pages.tables[sequence, : -(-length // page_size)].long()
        for out, pool in zip(found, (keys, values), strict=True):
            out[first : first + length] = pool[used].flatten(0, 1)[:length]
    return found[0], found[1]


def _columns(row: int) -> int:
    return min(_MAX_COLUMNS, 1 << (row - 1).bit_length())
