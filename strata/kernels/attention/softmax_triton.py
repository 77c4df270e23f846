"""The inner loop of attention: a block of keys joins the softmax of a tile of queries (FlashAttention-2, Dao 2023).

Of batch-invariant attention the keys of a sequence are divided into segments at fixed positions, each with a softmax of
its own, which are joined one by one, from the first on.

`queries_of_tile`: which queries a tile has, in kernels whose grids have tiles of all sequences one after the other.
"""

from __future__ import annotations

from strata.kernels.state.quantized_triton import exponent_at, powers_of
from strata.kernels.triton_import import jit, tl

# Keys of a segment, and after how many segments their size doubles; see `segment_start`.
SEGMENT_KEYS = 256
SEGMENTS = 16


@jit
def join_sink(maximum, weight, result, sinks, head, held):
    """The softmax of queries [rows] once the sink of each one's head, a score without a value, is part of it.

    maximum, weight [rows] and result [rows, HEAD_PAD] float32, the maximum in powers of two. The arithmetic is written
    as one `fma`, because compilers may round otherwise in another kernel.
    """
    score = tl.load(sinks + head, mask=held, other=0.0).to(tl.float32) * 1.4426950408889634
    largest = tl.maximum(maximum, score)
    shrink = tl.exp2(maximum - largest)
    return largest, tl.fma(weight, shrink, tl.exp2(score - largest)), result * shrink[:, None]


@jit
def key_slots(positions, held, first, table, PAGE_SIZE: tl.constexpr):
    """Where the keys at `positions` lie, in tokens from the start of k and v; PAGE_SIZE 0: packed, from `first` on."""
    if PAGE_SIZE == 0:
        return (first + positions).to(tl.int64)
    page = tl.load(table + positions // PAGE_SIZE, mask=held, other=0).to(tl.int64)
    return page * PAGE_SIZE + positions % PAGE_SIZE


@jit
def widened(rows, exponents, slots, held, kind: tl.constexpr, PAGE_SIZE: tl.constexpr, AS_COLUMNS: tl.constexpr):
    """Keys [HEAD_PAD, rows] (AS_COLUMNS) or values [rows, HEAD_PAD] in 8 bits as what they stand for, exactly; zeros
    where not held. exponents: from the first page's of this head on."""
    powers = powers_of(tl.load(exponents + exponent_at(slots, 0, tl.num_programs(0), PAGE_SIZE), mask=held, other=127))
    powers = powers[None, :] if AS_COLUMNS else powers[:, None]
    return (rows.to(tl.float32) * powers).to(kind)


@jit
def attend_block(
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
    INVARIANT: tl.constexpr,
):
    """One block of keys [start, start + BLOCK_N) joins the running softmax of a tile of queries.

    queries [rows, HEAD_PAD]; at [rows]: position of each; maximum, weight [rows] and result [rows, HEAD_PAD] float32:
    the largest score so far (in powers of two), the sum of the weights, the weighted sum of the values. Bit for bit, a
    block of which a row sees nothing leaves the row's state as it is, and, if INVARIANT, one that it sees whole does
    not need MASKED: what a compiler might round once or twice is an `fma` then.
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
    if not INVARIANT:
        scores = scores * scale
    if MASKED:
        visible = positions[None, :] <= at[:, None]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > at[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1) * scale if INVARIANT else tl.max(scores, 1))
    # A row that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = tl.where(largest == float("-inf"), 0.0, largest) if MASKED or INVARIANT else largest
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]) if INVARIANT else scores - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    weight = tl.fma(weight, shrink, tl.sum(weights, 1)) if INVARIANT else weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@jit
def no_keys(ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """The softmax of no keys."""
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    return maximum, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, HEAD_PAD), tl.float32)


@jit
def segment_start(part, SEGMENT_KEYS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Position of the first key of a segment.

    Segments have SEGMENT_KEYS keys up to position 2 * SEGMENTS * SEGMENT_KEYS, twice as many up to twice that position,
    and so on, as floating-point numbers are spaced: a long sequence has few, and the last are a small share of it.
    """
    doublings = max(part // SEGMENTS - 1, 0)
    return (part - doublings * SEGMENTS) * SEGMENT_KEYS << doublings


@jit
def segment_at(position, SEGMENT_KEYS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The segment that a position lies in."""
    doublings = 0
    while (position // SEGMENT_KEYS) >> doublings >= 2 * SEGMENTS:
        doublings += 1
    return ((position // SEGMENT_KEYS) >> doublings) + doublings * SEGMENTS


@jit
def join_segments(maximum, weight, result, part_maximum, part_weight, part_result):
    """The softmax of some segments and the one after them. One that a row sees nothing of changes nothing."""
    largest = tl.maximum(maximum, part_maximum)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    shrink = tl.exp2(maximum - shift)
    share = tl.exp2(part_maximum - shift)
    weight = tl.fma(part_weight, share, weight * shrink)
    result = tl.fma(part_result, share[:, None], result * shrink[:, None])
    return largest, weight, result


@jit
def sequence_of_tile(tile, starts, lowest, beyond, skipped, QUERIES: tl.constexpr):
    """The sequence, of [lowest, beyond), that has the tile, in so many QUERIES each: sequence s begins with tile
    starts[s] // QUERIES + s, where both are counted from `lowest` on, of which `skipped` is the start; the last that
    begins at this tile or before is found by halves."""
    sequence = lowest
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if (tl.load(starts + middle) - skipped) // QUERIES + middle - lowest <= tile:
            sequence = middle
        else:
            beyond = middle
    return sequence


@jit
def with_queries(starts, bounds, sequences):
    """Which sequences have queries, the first and the one behind the last, and where those of the first start. bounds:
    [2] int32 of them; None: any may, and starts[0] is 0."""
    if bounds is None:
        return 0, sequences, 0
    else:  # noqa: RET505  what a compiler of kernels would go through besides
        lowest = tl.load(bounds)
        beyond = tl.load(bounds + 1)
        return lowest, beyond, tl.load(starts + lowest)


@jit
def queries_of_tile(tile, starts, offsets, lowest, beyond, skipped, QUERIES: tl.constexpr):
    """A tile's sequence, the row of its first query, how many it has, and which of these is the first of the tile: past
    them if the tile has none. Of sequence s the queries in rows [starts[s], offsets[s + 1])."""
    sequence = sequence_of_tile(tile, starts, lowest, beyond, skipped, QUERIES)
    first = tl.load(starts + sequence)
    new = tl.load(offsets + sequence + 1) - first
    return sequence, first, new, (tile - (first - skipped) // QUERIES - (sequence - lowest)) * QUERIES
