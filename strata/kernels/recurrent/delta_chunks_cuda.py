"""The gated delta rule over prompts on CUDA: what its three kernels wait in, their tiles and their launches.

Grids follow from shapes alone, so that a step can be captured in a CUDA graph: a step of so many tokens and sequences
has `tokens // 64 + sequences` tiles at most, and a program finds the chunk that it is given, if any.

Of the three kernels only the walk from chunk to chunk is serial.

In a chunk of 64 tokens, with `d` the sum of the logarithms of decays up to a token, `K` and `V` its keys (of length 1)
and values, `L[i, j] = K[i] . K[j] exp(d[i] - d[j])` below the diagonal, `B` the strengths on it and `S` the state
before the chunk, a token puts into the state its row of `B P` (Yang et al. 2024, "Parallelizing linear transformers
with the delta rule over sequence length", section 3; decays as in Yang, Kautz and Hatamizadeh 2024), where

`P = X V - X (exp(d) K S)` and `X = (1 + L B)^-1`;

the state behind it is `exp(d[63]) S + (exp(d[63] - d) K)^T B P`, and the results are `exp(d) Q S + C B P`, where
`C[i, j] = Q[i] . K[j] exp(d[i] - d[j])` up to the diagonal. X knows no state: a kernel finds it for all chunks at once.
A second walks from chunk to chunk with the state in registers and leaves S and P, from which a third has the results,
again of all chunks at once.

With 32 heads of 128 by 128, two for a key head, 16,384 tokens are 8,192 chunks of heads. On an H200 (690 TFLOP/s of 16
bits sustained, 4.1 TB/s) they take at least

| kernel | products | GFLOP | us | moves | MB | us |
|---|---|---|---|---|---|---|
| solve | K K^T, 10 of 64x64x64 | 52 | 75 | K; X, four vectors | 145 | 35 |
| states | X V, S K, X (S K), K^T P | 52 | 75 | K, V, X; P, S | 677 | 165 |
| results | Q K^T, Q S, C P | 34 | 50 | Q, K, S, P; results | 675 | 165 |

405 us together, most of them by memory, where the recurrence has to move 410 MB (100 us). Multiplying X by K and V
ahead, as the paper does (`W` and `U`), would take two of four products from the walk and write and read 390 MB more.
S is kept in 16 bits: it is multiplied as such, and in float32 would be 537 MB instead of 268 of what the second kernel
writes and the third reads. The walk's products for 64 columns of values take a multiprocessor's tensor cores 768 cycles
a chunk: 256 chunks are 110 us at least, whatever the number of heads. So its programs hold the state with a row for a
column of values, as tensor cores take an operand and a sum from registers, 64 rows by 4 warps, and what is loaded for
the next chunks is on its way meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.softmax_triton import sequence_of_tile
from strata.kernels.choose import MEASURED, thresholds, thresholds_of
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.recurrent import gated_delta_triton
from strata.kernels.recurrent.gated_delta_triton import LENGTH_EPS, decay_of
from strata.kernels.recurrent.sequences import GatedDeltaCall, states_and_slots
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
    a,
    b,
    dt_bias,
    a_log,
    offsets,
    inverses,
    decays,
    weights,
    reads,
    lefts,
    sequences,
    heads,
    key_dim,
    shared,
    k_stride,
    a_stride,
    b_stride,
    eps,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Programs [(tokens // CHUNK + sequences) * heads], heads of a tile side by side; tiles as `sequence_of_tile` has
    them. In one dimension, because others have 65,535 at most. `shared` heads have one key head.

    Of each program: inverses [CHUNK, CHUNK], X; in float32 [CHUNK] decays, the sums, and what keys, which stay as they
    are, are multiplied by: weights, to length 1 and by their strengths; reads, to length 1, by what is left of the
    state before the chunk and by -1; lefts, weights by what is left of a token behind the chunk. What is no token has
    weight 0.
    HALVES: products for the inverse are of float16, as close as tf32. No number is above 1: X[i, j] is what key i has
    of key j behind the contractions (1 - beta K K^T) of the tokens between, times decays and a strength.
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
    place = tl.arange(0, KEY_DIM)[None, :]
    source = k + first * k_stride + head // shared * key_dim
    keys = tl.load(source + row * k_stride + place, mask=exists[:, None] & (place < key_dim), other=0.0)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    scale = tl.rsqrt(tl.sum(tl.where(row == column, alike, 0.0), 1) + eps)
    weight = tl.where(exists, scale / (1.0 + tl.exp(-opening)), 0.0)
    of_chunk = tl.program_id(0).to(tl.int64) * CHUNK
    tl.store(decays + of_chunk + index, decay)
    tl.store(weights + of_chunk + index, weight)
    tl.store(reads + of_chunk + index, -scale * tl.exp(decay))
    tl.store(lefts + of_chunk + index, weight * tl.exp(tl.sum(each, 0) - decay))
    between = tl.exp(tl.where(row > column, decay[:, None] - decay[None, :], -float("inf")))
    system = scale[:, None] * alike * weight[None, :] * between
    inverse = _inverse(system, row, column, HALVES, PRECISION)
    tl.store(inverses + of_chunk * CHUNK + row * CHUNK + column, inverse.to(inverses.dtype.element_ty))


@partial(jit, unspecialized=("slots", "offsets", "positions", "keeps"))
def gated_delta_states_kernel(
    k,
    v,
    inverses,
    decays,
    reads,
    lefts,
    puts,
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
    v_stride,
    keeps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs [value_dim / COLUMNS, heads, sequences]: from chunk to chunk. Those of the last sequences start first,
    since decodes stand in front of prompts. inverses, decays, reads, lefts: as `gated_delta_solve_kernel` left them.
    Takes of each chunk: puts [VALUE_DIM, CHUNK], the transpose of P; begins [VALUE_DIM, KEY_DIM], that of the state
    before it."""
    sequence = tl.num_programs(2) - 1 - tl.program_id(2)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        index = tl.arange(0, CHUNK)
        place = tl.arange(0, KEY_DIM)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside, held = place < key_dim, column < value_dim
        both = inside[:, None] & held[None, :]
        slot = tl.load(slots + sequence).to(tl.int64)
        kept = states + (slot * heads + head) * key_dim * value_dim + place[:, None] * value_dim + column[None, :]
        is_old = (keeps != 0) & (tl.load(positions + start) != 0)
        state = tl.trans(tl.load(kept, mask=both & is_old, other=0.0))
        chunk = (start // CHUNK + sequence) * heads + head
        key = k + start * k_stride + head // shared * key_dim
        value = v + start * v_stride + head * value_dim
        key_place = index[:, None] * k_stride + place[None, :]
        value_place = index[:, None] * v_stride + column[None, :]
        square = index[:, None] * CHUNK + index[None, :]
        put_place = column[:, None] * CHUNK + index[None, :]
        begin_place = column[:, None] * KEY_DIM + place[None, :]
        count = (end - start).to(tl.int32)
        last = decays + chunk * CHUNK + CHUNK - 1
        whole = tl.load(last)
        for done in range(0, count, CHUNK):
            # A chunk ahead by hand: Triton does so for blocks alone.
            last += heads * CHUNK
            next_whole = tl.load(last, mask=done + CHUNK < count, other=0.0)
            begun = state.to(begins.dtype.element_ty)
            tl.store(begins + chunk * VALUE_DIM * KEY_DIM + begin_place, begun)
            exists = index[:, None] < count - done
            keys = tl.load(key + key_place, mask=exists & inside[None, :], other=0.0)
            values = tl.load(value + value_place, mask=exists & held[None, :], other=0.0)
            inverse = tl.load(inverses + chunk * CHUNK * CHUNK + square)
            put = tl.dot(tl.trans(values), tl.trans(inverse), input_precision=PRECISION)
            read = tl.load(reads + chunk * CHUNK + index)[None, :]
            known = tl.dot(begun, tl.trans(keys), input_precision=PRECISION) * read
            put = tl.dot(known.to(keys.dtype), tl.trans(inverse), put, input_precision=PRECISION)
            tl.store(puts + chunk * VALUE_DIM * CHUNK + put_place, put.to(puts.dtype.element_ty))
            left = tl.load(lefts + chunk * CHUNK + index)[None, :]
            state = tl.dot((put * left).to(keys.dtype), keys, state * tl.exp(whole), input_precision=PRECISION)
            whole = next_whole
            key += CHUNK * k_stride
            value += CHUNK * v_stride
            chunk += heads
        tl.store(kept, tl.trans(state), mask=both & (keeps != 0))


@partial(jit, unspecialized=("offsets", "sequences"))
def gated_delta_results_kernel(
    q,
    k,
    puts,
    decays,
    weights,
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
    weight = tl.load(weights + program * CHUNK + index)
    wide = queries.to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, 1) + eps) * factor
    between = tl.exp(tl.where(row >= index[None, :], decay[:, None] - decay[None, :], -float("inf")))
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = (scores * length[:, None] * weight[None, :] * between).to(queries.dtype)
    begun = tl.load(begins + program * VALUE_DIM * KEY_DIM + column[:, None] * KEY_DIM + place)
    found = tl.dot(queries, tl.trans(begun), input_precision=PRECISION) * (length * tl.exp(decay))[:, None]
    put = tl.load(puts + program * VALUE_DIM * CHUNK + column[:, None] * CHUNK + index[None, :])
    found = tl.dot(scores, tl.trans(put), found, input_precision=PRECISION)
    target = result + (first * heads + head) * value_dim + row * heads * value_dim + column[None, :]
    tl.store(target, found.to(result.dtype.element_ty), mask=exists & (column < value_dim)[None, :])


KERNELS = (gated_delta_solve_kernel, gated_delta_states_kernel, gated_delta_results_kernel)


@dataclass(frozen=True)
class ColumnTile:
    """columns: of a head's values that a program has. stages: loads in flight, where there is a loop."""

    columns: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class DeltaTiles:
    """Of the three kernels."""

    solve_warps: int = 4
    states: ColumnTile = ColumnTile(64)
    results: ColumnTile = ColumnTile(128)


TILES = DeltaTiles()


@dataclass(frozen=True)
class _Sizes:
    """programs: chunks of heads at most, as many as `solve` has programs. key_dim, value_dim: padded."""

    programs: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> _Sizes:
        padded = (max(16, next_power_of_2(dim)) for dim in (key_dim, value_dim))
        return _Sizes((tokens // CHUNK + sequences) * heads, *padded)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of what the kernels hand on: X, P and the state, and four vectors in float32."""
        elements = CHUNK * (CHUNK + self.value_dim) + self.key_dim * self.value_dim
        return self.programs * (elements * dtype.itemsize + 4 * CHUNK * 4)


def supports(call: GatedDeltaCall) -> bool:
    """A long sequence in bfloat16, and not many others beside it: of each sequence there is a tile at least, with a
    state that is written and read once more, where chunks of 16, one after another, hand nothing on."""
    q, k, v, batch = call.q, call.k, call.v, call.batch
    known = thresholds(q.device)
    each = known.parallel_chunk_tokens_each * (batch.offsets.shape[0] - 1)
    return (
        batch.longest >= max(known.parallel_chunk_tokens, each)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and max(k.shape[2], v.shape[2]) <= 128
        and gated_delta_triton.supports(call)
    )


def scratch(call: GatedDeltaCall) -> int:
    """What the kernels hand on to each other."""
    v, sequences = call.v, call.batch.offsets.shape[0] - 1
    return _Sizes.of(v.shape[0], sequences, v.shape[1], call.k.shape[2], v.shape[2]).nbytes(v.dtype)


def scratch_bytes(tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """The most that `scratch` is in a step of so many tokens and sequences at most."""
    known = thresholds_of(MEASURED)
    if tokens < known.parallel_chunk_tokens or dtype != torch.bfloat16:
        return 0
    sequences = min(sequences, tokens // known.parallel_chunk_tokens_each)
    return _Sizes.of(tokens, sequences, heads, key_dim, value_dim).nbytes(dtype)


def launch(call: GatedDeltaCall, tiles: DeltaTiles = TILES) -> Tensor:
    q, k, v, a, b, dt_bias, a_log, batch, layer = call
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not result.numel():
        return result
    kept, slots = states_and_slots(batch, layer, v)
    sequences, shared = batch.offsets.shape[0] - 1, heads // key_heads
    sizes = _Sizes.of(v.shape[0], sequences, heads, key_dim, value_dim)
    programs, keys, values = sizes.programs, sizes.key_dim, sizes.value_dim
    inverses, puts = v.new_empty(programs, CHUNK, CHUNK), v.new_empty(programs, values, CHUNK)
    begins = v.new_empty(programs, values, keys)
    decays, weights, reads, lefts = v.new_empty(4, programs, CHUNK, dtype=torch.float32).unbind()
    padded: dict[str, Any] = {"CHUNK": CHUNK, "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32"}
    padded["KEY_DIM"] = keys
    gated_delta_solve_kernel[(programs,)](
        *(k, a, b, dt_bias, a_log, batch.offsets, inverses, decays, weights, reads, lefts),
        *(sequences, heads, key_dim, shared, k.stride(0), a.stride(0), b.stride(0), LENGTH_EPS),
        **padded,
        HALVES=v.dtype == torch.bfloat16,
        num_warps=tiles.solve_warps,
    )
    padded["VALUE_DIM"] = values
    own = _options(tiles.states, values)
    gated_delta_states_kernel[(ceil_div(value_dim, own["COLUMNS"]), heads, sequences)](
        *(k, v, inverses, decays, reads, lefts, puts, begins, kept, slots, batch.offsets, batch.positions),
        *(heads, key_dim, value_dim, shared, k.stride(0), v.stride(0), int(batch.states is not None)),
        **padded,
        **own,
    )
    own = _options(tiles.results, values)
    gated_delta_results_kernel[(programs * (values // own["COLUMNS"]),)](
        *(q, k, puts, decays, weights, begins, batch.offsets, result),
        *(sequences, heads, key_dim, value_dim, shared, q.stride(0), k.stride(0), LENGTH_EPS, key_dim**-0.5),
        **padded,
        **own,
    )
    return result


def _options(tile: ColumnTile, most: int) -> dict[str, int]:
    return {"COLUMNS": min(tile.columns, most), "num_warps": tile.warps, "num_stages": tile.stages}
