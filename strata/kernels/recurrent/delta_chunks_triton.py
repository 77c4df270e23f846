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
def _join(inverse, system, row, column, size, PRECISION: tl.constexpr):
    """From inverses of the blocks of `size` on the diagonal those of blocks twice as large: [[P, 0], [Q, R]]^-1 has
    -R^-1 Q P^-1 below its diagonal."""
    below = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
    part = tl.dot(inverse, tl.where(below, system, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(part, inverse, input_precision=PRECISION)


@jit
def _inverse(system, row, column, PRECISION: tl.constexpr):
    """(1 + system)^-1 [64, 64], of a system that stands below the diagonal alone."""
    found = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -system, 0.0))
    for level in tl.static_range(1, 6):
        found = _join(found, system, row, column, 2**level, PRECISION)
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
):
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    first, end = _first_of(tile, offsets, sequences, CHUNK)
    if first >= end:
        return
    index = tl.arange(0, CHUNK)
    row, column = index[:, None], index[None, :]
    place, held = tl.arange(0, KEY_DIM)[None, :], tl.arange(0, VALUE_DIM)[None, :]
    token = first + index
    exists = token < end
    each = decay_of(
        tl.load(a + token * a_stride + head, mask=exists, other=0.0),
        tl.load(dt_bias + head).to(tl.float32),
        -tl.exp(tl.load(a_log + head).to(tl.float32)),
    )
    decay = tl.cumsum(tl.where(exists, each, 0.0), 0)
    opening = tl.load(b + token * b_stride + head, mask=exists, other=0.0).to(tl.float32)
    strength = tl.where(exists, 1.0 / (1.0 + tl.exp(-opening)), 0.0)
    source = k + (token * k_stride)[:, None] + head // shared * key_dim + place
    keys = tl.load(source, mask=exists[:, None] & (place < key_dim), other=0.0)
    wide = keys.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    between = tl.exp(tl.where(row > column, decay[:, None] - decay[None, :], -float("inf")))
    system = (strength * scale)[:, None] * alike * scale[None, :] * between
    inverse = _inverse(system, row, column, PRECISION)
    program = tl.program_id(0).to(tl.int64)
    tl.store(decays + program * CHUNK + index, decay)
    tl.store(scales + program * CHUNK + index, scale)
    weights = (inverse * (strength * scale * tl.exp(decay))[None, :]).to(keys.dtype)
    found = tl.dot(weights, keys, input_precision=PRECISION)
    tl.store(reads + (program * CHUNK + row) * KEY_DIM + place, found.to(reads.dtype.element_ty))
    source = v + (token * v_stride)[:, None] + head * value_dim + held
    values = tl.load(source, mask=exists[:, None] & (held < value_dim), other=0.0)
    weights = (inverse * strength[None, :]).to(values.dtype)
    found = tl.dot(tl.trans(values), tl.trans(weights), input_precision=PRECISION)
    target = puts + (program * VALUE_DIM + tl.arange(0, VALUE_DIM)[:, None]) * CHUNK + column
    tl.store(target, found.to(puts.dtype.element_ty))


@partial(jit, unspecialized=("slots", "offsets", "positions", "keeps"))
def gated_delta_states_kernel(
    k,
    reads,
    puts,
    decays,
    scales,
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
        at = (start // CHUNK + sequence) * heads + head
        key = k + head // shared * key_dim + place[None, :]
        for first in range(start, end, CHUNK):
            decay = tl.load(decays + at * CHUNK + index)
            scale = tl.load(scales + at * CHUNK + index)
            last = tl.load(decays + at * CHUNK + CHUNK - 1)
            begin = begins + (at * VALUE_DIM + column[:, None]) * KEY_DIM + place[None, :]
            begun = state.to(begins.dtype.element_ty)
            tl.store(begin, begun)
            read = tl.load(reads + (at * CHUNK + index[:, None]) * KEY_DIM + place[None, :])
            target = puts + (at * VALUE_DIM + column[:, None]) * CHUNK + index[None, :]
            put = tl.load(target).to(tl.float32)
            put -= tl.dot(begun, tl.trans(read), input_precision=PRECISION)
            tl.store(target, put.to(puts.dtype.element_ty))
            token = first + index[:, None]
            keys = tl.load(key + token * k_stride, mask=(token < end) & (place < key_dim)[None, :], other=0.0)
            left = (put * (scale * tl.exp(last - decay))[None, :]).to(keys.dtype)
            state = tl.dot(left, keys, state * tl.exp(last), input_precision=PRECISION)
            at += heads
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
    place = tl.arange(0, KEY_DIM)
    column = tl.program_id(0) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    token = first + index[:, None]
    mask = (token < end) & (place < key_dim)[None, :]
    group = head // shared * key_dim + place[None, :]
    queries = tl.load(q + token * q_stride + group, mask=mask, other=0.0)
    keys = tl.load(k + token * k_stride + group, mask=mask, other=0.0)
    decay = tl.load(decays + program * CHUNK + index)
    scale = tl.load(scales + program * CHUNK + index)
    wide = queries.to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, 1) + eps) * factor
    seen = index[:, None] >= index[None, :]
    between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], -float("inf")))
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = (scores * length[:, None] * scale[None, :] * between).to(queries.dtype)
    begun = tl.load(begins + (program * VALUE_DIM + column[:, None]) * KEY_DIM + place[None, :])
    found = tl.dot(queries, tl.trans(begun), input_precision=PRECISION) * (length * tl.exp(decay))[:, None]
    put = tl.load(puts + (program * VALUE_DIM + column[:, None]) * CHUNK + index[None, :])
    found = tl.dot(scores, tl.trans(put), found, input_precision=PRECISION)
    target = result + (token * heads + head) * value_dim + column[None, :]
    tl.store(target, found.to(result.dtype.element_ty), mask=(token < end) & (column < value_dim)[None, :])
