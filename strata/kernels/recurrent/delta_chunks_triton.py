"""The gated delta rule over prompts in Triton: three kernels, of which only the walk from chunk to chunk is serial.

In a chunk of 64 tokens, with `d` the sum of the logarithms of decays up to a token, `K` and `V` its keys (of length 1)
and values, `L[i, j] = K[i] . K[j] exp(d[i] - d[j])` below the diagonal, `B` the strengths on it and `S` the state
before the chunk, what the tokens put into the state is (Yang et al. 2024, "Parallelizing linear transformers with the
delta rule over sequence length", section 3; decays as in Yang, Kautz and Hatamizadeh 2024)

`P = U - W S`, with `U = B X V`, `W = B X exp(d) K` and `X = (1 + L B)^-1`;

the state behind it is `exp(d[63]) S + (exp(d[63] - d) K)^T P`, and the results are `exp(d) Q S + C P`, where `C[i, j] =
Q[i] . K[j] exp(d[i] - d[j])` up to the diagonal. U and W know no state: a kernel solves for them in all chunks at once.
A second walks from chunk to chunk with the state in registers and leaves S and P, from which a third has the results,
again of all chunks at once.

With 32 heads of 128 by 128, two for a key head, 16,384 tokens are 8,192 chunks of heads. On an H200 (690 TFLOP/s of 16
bits sustained, 4.1 TB/s) they take at least

| kernel | products | GFLOP | us | moves | MB | us |
|---|---|---|---|---|---|---|
| solve | K K^T; 10 of 64x64x64; X K, X V | 69 | 100 | K, V; W, U, three vectors | 475 | 116 |
| states | W S, K^T P | 34 | 50 | W, U, K; P, S | 741 | 181 |
| results | Q K^T, Q S, scores P | 34 | 50 | Q, K, S, P; results | 675 | 165 |

so memory bounds each, 462 us together, where the recurrence has to move 410 MB (100 us). S is kept in 16 bits: it is
multiplied as such, and in float32 would be 537 MB instead of 268 of what the second kernel writes and the third reads.
The walk has two products in a row for a chunk, 512 cycles of a multiprocessor's tensor cores for 64 columns of values:
256 chunks are 75 us at least, whatever the number of heads. So its programs hold the state with a row for a column of
values, as the operand and the sum that tensor cores take from registers, 64 rows by 4 warps, and nothing but that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from strata.kernels.attention.query_tiles import sequence_of_tile
from strata.kernels.compile_case import CompileCase, by_type
from strata.kernels.recurrent.gated_delta_triton import decay_of
from strata.kernels.triton_import import jit, tl

CHUNK = 64


@jit
def _first_of(tile, offsets, sequences, CHUNK: tl.constexpr):
    """The first token of a tile, and the end of its sequence; a tile that is given none begins there or behind it."""
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
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Programs [(tokens // CHUNK + sequences) * heads], heads of a tile side by side; tiles as `sequence_of_tile` has
    them. In one dimension, because others have 65,535 at most. `shared` heads have one key head.

    Of each program: reads [CHUNK, KEY_DIM] and puts [VALUE_DIM, CHUNK], W and the transpose of U; in float32 [CHUNK]
    decays, the sums; scales, of keys to length 1; lefts, the scales with what is left of a token behind the chunk.
    Rows and columns that are none are zeros. Keys and values stay as they are, and what scales them stands in the
    other factor. COLUMNS: of a product. HALVES: the inverse is of float16, whose numbers are as close as those of tf32
    and, none of them being above 1, as far.
    """
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    first, end = _first_of(tile, offsets, sequences, CHUNK)
    if first >= end:
        return
    index = tl.arange(0, CHUNK)
    row, column = index[:, None], index[None, :]
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
    key = k + first * k_stride + head // shared * key_dim
    place = tl.arange(0, KEY_DIM)[None, :]
    keys = tl.load(key + row * k_stride + place, mask=exists[:, None] & (place < key_dim), other=0.0)
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
    for start in tl.static_range(0, KEY_DIM, COLUMNS):
        held = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (held < key_dim)[None, :]
        part = tl.load(key + row * k_stride + held[None, :], mask=mask, other=0.0)
        read = tl.dot(weights, part, input_precision=PRECISION) * strength[:, None]
        target = reads + of_chunk * KEY_DIM + row * KEY_DIM + held[None, :]
        tl.store(target, read.to(reads.dtype.element_ty))
    weights = inverse.to(keys.dtype)
    value = v + first * v_stride + head * value_dim
    for start in tl.static_range(0, VALUE_DIM, COLUMNS):
        held = start + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (held < value_dim)[None, :]
        part = tl.load(value + row * v_stride + held[None, :], mask=mask, other=0.0)
        put = tl.dot(tl.trans(part), tl.trans(weights), input_precision=PRECISION) * strength[None, :]
        target = puts + of_chunk * VALUE_DIM + held[:, None] * CHUNK + column
        tl.store(target, put.to(puts.dtype.element_ty))


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
    """Programs [sequences, heads, value_dim / COLUMNS]: from chunk to chunk. reads, decays, lefts: as
    `gated_delta_solve_kernel` left them. puts: too; what each token puts into the state takes the place of U. begins
    [VALUE_DIM, KEY_DIM] of each chunk: takes the transpose of the state before it."""
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
        last = decays + chunk * CHUNK + CHUNK - 1
        whole = tl.load(last)
        for first in range(start, end, CHUNK):
            # A chunk ahead by hand: Triton does so for blocks alone.
            last += heads * CHUNK
            next_whole = tl.load(last, mask=first + CHUNK < end, other=0.0)
            begun = state.to(begins.dtype.element_ty)
            tl.store(begins + chunk * VALUE_DIM * KEY_DIM + begin_place, begun)
            read = tl.load(reads + chunk * CHUNK * KEY_DIM + read_place)
            put = tl.load(puts + chunk * VALUE_DIM * CHUNK + put_place).to(tl.float32)
            # As a sum it would be where the product adds up, and Triton loads nothing ahead for that.
            put -= tl.dot(begun, tl.trans(read), input_precision=PRECISION)
            tl.store(puts + chunk * VALUE_DIM * CHUNK + put_place, put.to(puts.dtype.element_ty))
            exists = (index < end - first)[:, None] & (place < key_dim)[None, :]
            keys = tl.load(key + key_place, mask=exists, other=0.0)
            left = (put * tl.load(lefts + chunk * CHUNK + index)[None, :]).to(keys.dtype)
            state = tl.dot(left, keys, state * tl.exp(whole), input_precision=PRECISION)
            whole = next_whole
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
    """Programs [(tokens // CHUNK + sequences) * heads * (VALUE_DIM / COLUMNS)], those of a chunk side by side. puts,
    begins: as `gated_delta_states_kernel` left them."""
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


def compile_cases() -> list[CompileCase]:
    """Heads of 128 by 128, as Qwen3-Next has."""
    signature = by_type(
        {
            "*bf16:16": "q k v a b dt_bias a_log reads puts begins result",
            "*fp32:16": "decays scales lefts states",
            "*i32": "slots offsets positions",
            "i32:16": "heads key_dim value_dim q_stride k_stride v_stride a_stride b_stride",
            "i32": "sequences shared keeps",
            "fp32": "eps factor",
        }
    )
    padded = {"KEY_DIM": 128, "VALUE_DIM": 128, "CHUNK": CHUNK, "PRECISION": "tf32"}
    kernels: list[tuple[str, Any, dict[str, object], int]] = [
        ("solve", gated_delta_solve_kernel, {"COLUMNS": 64, "HALVES": True}, 3),
        ("states", gated_delta_states_kernel, {"COLUMNS": 64}, 3),
        ("results", gated_delta_results_kernel, {"COLUMNS": 128}, 3),
    ]
    found = []
    for name, kernel, own, stages in kernels:
        types = {one: kind for one, kind in signature.items() if one in kernel.arg_names}
        found.append(CompileCase(f"gated_delta {name}", kernel, types, padded | own, 4, stages, ("wgmma",)))
    return found
