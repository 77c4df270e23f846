"""The Triton kernels of the choice of pages: bounds of what is written, scores by them, the pages of the largest."""

from __future__ import annotations

from functools import partial

from strata.kernels.triton_import import jit, tl


@partial(jit, unspecialized=("offsets", "lengths", "tables", "sequences", "table_stride"))
def page_bounds_kernel(
    keys,
    bounds,
    offsets,
    lengths,
    tables,
    sequences,
    table_stride,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Programs [tokens // PAGE_SIZE + 2 * sequences, kv_heads]: one page into which keys of the step were written.

    Of sequence s the pages from (lengths[s] - new) // PAGE_SIZE on, where new is how many tokens it has in the step;
    their programs begin with offsets[s] // PAGE_SIZE + 2 * s. bounds: [pages, 2, kv_heads, HEAD_DIM].
    """
    at = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = 0
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(offsets + middle) // PAGE_SIZE + 2 * middle <= at:
            sequence = middle
        else:
            beyond = middle
    first = tl.load(offsets + sequence)
    new = tl.load(offsets + sequence + 1) - first
    total = tl.load(lengths + sequence)
    place = (total - new) // PAGE_SIZE + at - first // PAGE_SIZE - 2 * sequence
    if (total < new) | (place * PAGE_SIZE >= total):
        return
    page = tl.load(tables + sequence * table_stride + place).to(tl.int64)
    row = tl.arange(0, PAGE_SIZE)
    column = tl.arange(0, HEAD_PAD)
    inside = column < HEAD_DIM
    held = (place * PAGE_SIZE + row < total)[:, None] & inside[None, :]
    source = keys + ((page * PAGE_SIZE + row) * kv_heads + kv_head)[:, None] * HEAD_DIM + column[None, :]
    found = tl.load(source, mask=held, other=0.0).to(tl.float32)
    target = bounds + (page * 2 * kv_heads + kv_head) * HEAD_DIM + column
    least = tl.min(tl.where(held, found, float("inf")), 0)
    most = tl.max(tl.where(held, found, float("-inf")), 0)
    tl.store(target, least.to(bounds.dtype.element_ty), mask=inside)
    tl.store(target + kv_heads * HEAD_DIM, most.to(bounds.dtype.element_ty), mask=inside)


@partial(jit, unspecialized=("lengths", "tables", "table_stride", "most"))
def page_scores_kernel(
    q,
    bounds,
    scores,
    lengths,
    tables,
    q_stride,
    table_stride,
    most,
    kept_keys,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Programs [any, kv_heads, sequences]: the most that keys of pages can score, PAGES at a time by turns.

    Row s of q [sequences, heads * HEAD_DIM] is the query of sequence s. scores [sequences, kv_heads, most] float32; of
    sequences of at most kept_keys keys, and past the last page, none are written.
    """
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    length = tl.load(lengths + sequence)
    if length <= kept_keys:
        return
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    column = tl.arange(0, HEAD_PAD)
    inside = column < HEAD_DIM
    for first in range(tl.program_id(0) * PAGES, pages, tl.num_programs(0) * PAGES):
        place = first + tl.arange(0, PAGES)
        there = place < pages
        page = tl.load(tables + sequence * table_stride + place, mask=there, other=0).to(tl.int64)
        held = there[:, None] & inside[None, :]
        source = bounds + ((page * 2 * kv_heads + kv_head) * HEAD_DIM)[:, None] + column[None, :]
        least = tl.load(source, mask=held, other=0.0).to(tl.float32)
        max_of = tl.load(source + kv_heads * HEAD_DIM, mask=held, other=0.0).to(tl.float32)
        best = tl.full((PAGES,), float("-inf"), tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            query = tl.load(q + sequence * q_stride + head * HEAD_DIM + column, mask=inside, other=0.0).to(tl.float32)
            found = tl.sum(tl.maximum(query[None, :] * least, query[None, :] * max_of), 1)
            best = tl.maximum(best, found)
        tl.store(scores + (sequence * kv_heads + kv_head) * most + place, best, mask=there)


@partial(jit, unspecialized=("lengths", "tables", "table_stride", "most"))
def chosen_pages_kernel(
    scores,
    chosen,
    seen,
    lengths,
    tables,
    table_stride,
    most,
    COUNT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Programs [kv_heads, sequences]: the pages of the COUNT largest scores, in the order of their places.

    scores: of `page_scores_kernel`. The last page is always chosen; of equal scores the earlier is. chosen [sequences,
    kv_heads, COUNT] int32 and seen [sequences] int32: the block table of what is attended to, and how many keys it has;
    of sequences with no more pages, all of them. PLACES: a power of two from `most` on.
    """
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    place = tl.arange(0, PLACES)
    there = place < pages
    is_chosen = there
    if pages > COUNT:
        row = scores + (sequence * tl.num_programs(0) + kv_head) * most
        others = place < pages - 1
        bits = tl.load(row + place, mask=others, other=0.0).to(tl.int32, bitcast=True)
        # In the order of the numbers: those of negative ones go down as these go up.
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        low = tl.full((), -2147483648, tl.int64)  # so many or more are at least as large
        high = tl.full((), 2147483648, tl.int64)
        for _ in range(32):
            middle = (low + high) >> 1
            enough = tl.sum((others & (order >= middle)).to(tl.int32), 0) >= COUNT - 1
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        above = others & (order > low)
        equal = (others & (order == low)).to(tl.int32)
        room = COUNT - 1 - tl.sum(above.to(tl.int32), 0)
        is_chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= room)) | (place == pages - 1)
    ones = is_chosen.to(tl.int32)
    target = tl.cumsum(ones, 0) - ones
    page = tl.load(tables + sequence * table_stride + place, mask=is_chosen, other=0)
    tl.store(chosen + (sequence * tl.num_programs(0) + kv_head) * COUNT + target, page, mask=is_chosen)
    if kv_head == 0:
        tl.store(seen + sequence, length - tl.maximum(pages - COUNT, 0) * PAGE_SIZE)


# Pages that a program scores, and the warps of each kernel.
SCORED_PAGES = 32
BOUNDS_WARPS, SCORES_WARPS = 2, 4


def choice_warps(places: int) -> int:
    """Of a program that chooses among so many pages, whose scores it has in registers."""
    return min(16, max(4, places // 512))
