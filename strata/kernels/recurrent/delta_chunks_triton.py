"""The gated delta rule over prompts in Triton: three kernels, of which only the walk from chunk to chunk is serial."""

from __future__ import annotations

from functools import partial

from strata.kernels.attention.query_tiles import sequence_of_tile
from strata.kernels.recurrent.gated_delta_triton import decay_of
from strata.kernels.triton_import import jit, tl

CHUNK = 64


@jit
def _first_of(tile, offsets, sequences, CHUNK: tl.constexpr):
    """The first token of a tile, and the end of its sequence; a tile that nothing is left for begins there or behind."""
    sequence = sequence_of_tile(tile, offsets, 0, sequences, 0, CHUNK)
    start = tl.load(offsets + sequence)
    first = start + (tile - start // CHUNK - sequence) * CHUNK
    return first.to(tl.int64), tl.load(offsets + sequence + 1).to(tl.int64)


@jit
def _inverse(system, row, column, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 [64, 64] in float32, of a system in float32 that stands below the diagonal alone.

    From the blocks on the diagonal, of two numbers at first, to those twice as large: [[P, 0], [Q, R]]^-1 has
    -R^-1 Q P^-1 below its diagonal. HALVES: products are of float16.
    """
    found = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -system, 0.0))
    kind = tl.float16 if HALVES else tl.float32
    factor = system.to(kind)
    for level in tl.static_range(1, 6):
        known = found.to(kind)
        part = tl.dot(known, factor, input_precision=PRECISION).to(kind)
        both = tl.dot(part, known, input_precision=PRECISION)
        below = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
        found = tl.where(below, -both, found)
    return found


@partial(jit, unspecialized=("offsets", "sequences"))
def gated_delta_solve_kernel(
    k,
    v,
    a,
    b,
    dt_bias,
    a_log,
    offsets,
    reads,
    puts,
    decays,
    scales,
    lefts,
    sequences,
    heads,
    key_dim,
    value_dim,
    shared,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    eps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    first, end = _first_of(tile, offsets, sequences, CHUNK)
    if first >= end:
        return
    index = tl.arange(0, CHUNK)
    row, column = index[:, None], index[None, :]
    place, held = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    exists = index < end - first
    each = decay_of(
        tl.load(a + first * a_stride + head + index * a_stride, mask=exists, other=0.0),
        tl.load(dt_bias + head).to(tl.float32),
        -tl.exp(tl.load(a_log + head).to(tl.float32)),
    )
    each = tl.where(exists, each, 0.0)
    decay = tl.cumsum(each, 0)
    opening = tl.load(b + first * b_stride + head + index * b_stride, mask=exists, other=0.0).to(tl.float32)
    strength = tl.where(exists, 1.0 / (1.0 + tl.exp(-opening)), 0.0)
    source = k + first * k_stride + head // shared * key_dim
    source += row * k_stride + place[None, :]
    keys = tl.load(source, mask=exists[:, None] & (place < key_dim)[None, :], other=0.0)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    scale = tl.rsqrt(tl.sum(tl.where(row == column, alike, 0.0), 1) + eps)
    of_chunk = tl.program_id(0).to(tl.int64) * CHUNK
    tl.store(decays + of_chunk + index, decay)
    tl.store(scales + of_chunk + index, scale)
    tl.store(lefts + of_chunk + index, scale * tl.exp(tl.sum(each, 0) - decay))
    between = tl.exp(tl.where(row > column, decay[:, None] - decay[None, :], -float("inf")))
    system = scale[:, None] * alike * (scale * strength)[None, :] * between
    inverse = _inverse(system, row, column, HALVES, PRECISION)
    weights = (inverse * (scale * tl.exp(decay))[None, :]).to(keys.dtype)
    found = tl.dot(weights, keys, input_precision=PRECISION) * strength[:, None]
    target = reads + of_chunk * KEY_DIM + row * KEY_DIM + place[None, :]
    tl.store(target, found.to(reads.dtype.element_ty))
    source = v + first * v_stride + head * value_dim
    source += row * v_stride + held[None, :]
    values = tl.load(source, mask=exists[:, None] & (held < value_dim)[None, :], other=0.0)
    found = tl.dot(inverse.to(values.dtype), values, input_precision=PRECISION) * strength[:, None]
    target = puts + of_chunk * VALUE_DIM + held[None, :] * CHUNK + row
    tl.store(target, found.to(puts.dtype.element_ty))


@partial(jit, unspecialized=("slots", "offsets", "positions", "keeps"))
def gated_delta_states_kernel(
    k,
    reads,
    puts,
    decays,
    lefts,
    begins,
    states,
    slots,
    offsets,
    positions,
    heads,
    key_dim,
    value_dim,
    shared,
    k_stride,
    keeps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        index = tl.arange(0, CHUNK)
        place = tl.arange(0, KEY_DIM)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        both = (place < key_dim)[:, None] & (column < value_dim)[None, :]
        slot = tl.load(slots + sequence).to(tl.int64)
        kept = states + (slot * heads + head) * key_dim * value_dim + place[:, None] * value_dim + column[None, :]
        is_old = (keeps != 0) & (tl.load(positions + start) != 0)
        state = tl.trans(tl.load(kept, mask=both & is_old, other=0.0))
        chunk = (start // CHUNK + sequence) * heads + head
        key = k + start * k_stride + head // shared * key_dim
        key_place = index[:, None] * k_stride + place[None, :]
        read_place = index[:, None] * KEY_DIM + place[None, :]
        put_place = column[:, None] * CHUNK + index[None, :]
        begin_place = column[:, None] * KEY_DIM + place[None, :]
        for first in range(start, end, CHUNK):
            begun = state.to(begins.dtype.element_ty)
            tl.store(begins + chunk * VALUE_DIM * KEY_DIM + begin_place, begun)
            read = tl.load(reads + chunk * CHUNK * KEY_DIM + read_place)
            put = tl.load(puts + chunk * VALUE_DIM * CHUNK + put_place).to(tl.float32)
            put -= tl.dot(begun, tl.trans(read), input_precision=PRECISION)
            tl.store(puts + chunk * VALUE_DIM * CHUNK + put_place, put.to(puts.dtype.element_ty))
            exists = (index < end - first)[:, None] & (place < key_dim)[None, :]
            keys = tl.load(key + key_place, mask=exists, other=0.0)
            left = (put * tl.load(lefts + chunk * CHUNK + index)[None, :]).to(keys.dtype)
            whole = tl.exp(tl.load(decays + chunk * CHUNK + CHUNK - 1))
            state = tl.dot(left, keys, state * whole, input_precision=PRECISION)
            key += CHUNK * k_stride
            chunk += heads
        tl.store(kept, tl.trans(state), mask=both & (keeps != 0))


@partial(jit, unspecialized=("offsets", "sequences"))
def gated_delta_results_kernel(
    q,
    k,
    puts,
    decays,
    scales,
    begins,
    offsets,
    result,
    sequences,
    heads,
    key_dim,
    value_dim,
    shared,
    q_stride,
    k_stride,
    eps,
    factor,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = VALUE_DIM // COLUMNS
    program = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = program % heads
    first, end = _first_of(program // heads, offsets, sequences, CHUNK)
    if first >= end:
        return
    index = tl.arange(0, CHUNK)
    row = index[:, None]
    place = tl.arange(0, KEY_DIM)[None, :]
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    exists = row < end - first
    group = head // shared * key_dim
    queries = tl.load(q + first * q_stride + group + row * q_stride + place, mask=exists & (place < key_dim), other=0.0)
    keys = tl.load(k + first * k_stride + group + row * k_stride + place, mask=exists & (place < key_dim), other=0.0)
    decay = tl.load(decays + program * CHUNK + index)
    scale = tl.load(scales + program * CHUNK + index)
    wide = queries.to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, 1) + eps) * factor
    between = tl.exp(tl.where(row >= index[None, :], decay[:, None] - decay[None, :], -float("inf")))
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = (scores * length[:, None] * scale[None, :] * between).to(queries.dtype)
    begun = tl.load(begins + program * VALUE_DIM * KEY_DIM + column[:, None] * KEY_DIM + place)
    found = tl.dot(queries, tl.trans(begun), input_precision=PRECISION) * (length * tl.exp(decay))[:, None]
    put = tl.load(puts + program * VALUE_DIM * CHUNK + column[:, None] * CHUNK + index[None, :])
    found = tl.dot(scores, tl.trans(put), found, input_precision=PRECISION)
    target = result + (first * heads + head) * value_dim + row * heads * value_dim + column[None, :]
    tl.store(target, found.to(result.dtype.element_ty), mask=exists & (column < value_dim)[None, :])
