"""The gated delta rule in Triton: token after token, or chunk after chunk with products on tensor cores.

Programs take some columns of one head of one sequence and keep their part of the state in registers from the sequence's
first token to its last, as those of `state_space_triton` do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.recurrent.sequences import STATE, GatedDeltaCall, states_and_slots
from strata.kernels.recurrent.state_space_triton import first_state, tile_of
from strata.kernels.triton_import import jit, tl

# Added to the squares of a query or key before the root, as in flash-linear-attention and transformers.
LENGTH_EPS = 1e-6


@jit
def decay_of(a, bias, rate):
    """The logarithm of a decay; past 20 softplus is the number itself."""
    raw = a.to(tl.float32) + bias
    return rate * tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))


@jit
def _direction(x, eps, factor, AXIS: tl.constexpr):
    """Vectors along an axis, of length `factor`."""
    wide = x.to(tl.float32)
    return wide * (tl.rsqrt(tl.sum(wide * wide, AXIS, keep_dims=True) + eps) * factor)


# The recurrence is one binary for all batches, with states or without, of rows at any address: another one could lay
# the state out in another way among threads and add up in another order.
_UNSPECIALIZED = ("slots", "offsets", "positions", "keeps")
_ROWS = ("q", "k", "v", "a", "b", "q_stride", "k_stride", "v_stride", "a_stride", "b_stride")


@partial(jit, unspecialized=(*_UNSPECIALIZED, *_ROWS))
def gated_delta_kernel(
    q,
    k,
    v,
    a,
    b,
    dt_bias,
    a_log,
    states,
    slots,
    offsets,
    positions,
    result,
    heads,
    key_dim,
    value_dim,
    shared,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    eps,
    factor,
    keeps,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs [sequences, heads, value_dim / COLUMNS]: a token after another. `shared` heads have one key head."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.arange(0, KEY_DIM)
        held, inside = column < value_dim, place < key_dim
        both = inside[:, None] & held[None, :]
        sizes = (heads, key_dim, value_dim)
        kept, state = first_state(states, slots, positions, sequence, head, start, place, column, both, sizes, keeps)
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        group = head // shared * key_dim
        for token in range(start, end):
            decay = decay_of(tl.load(a + token * a_stride + head), bias, rate)
            strength = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
            query = tl.load(q + token * q_stride + group + place, mask=inside, other=0.0)
            key = tl.load(k + token * k_stride + group + place, mask=inside, other=0.0)
            query, key = _direction(query, eps, factor, 0), _direction(key, eps, 1.0, 0)
            value = tl.load(v + token * v_stride + head * value_dim + column, mask=held, other=0.0).to(tl.float32)
            state = state * tl.exp(decay)
            change = strength * (value - tl.sum(state * key[:, None], 0))
            state += key[:, None] * change[None, :]
            found = tl.sum(state * query[:, None], 0)
            target = result + (token * heads + head) * value_dim + column
            tl.store(target, found.to(result.dtype.element_ty), mask=held)
        tl.store(kept, state, mask=both & (keeps != 0))


@partial(jit, unspecialized=_UNSPECIALIZED)
def gated_delta_chunks_kernel(
    q,
    k,
    v,
    a,
    b,
    dt_bias,
    a_log,
    states,
    slots,
    offsets,
    positions,
    result,
    heads,
    key_dim,
    value_dim,
    shared,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    eps,
    factor,
    keeps,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs [sequences, heads, value_dim / COLUMNS]: CHUNK tokens after CHUNK. PRECISION: of products in float32."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.arange(0, KEY_DIM)
        held, inside = column < value_dim, place < key_dim
        both = inside[:, None] & held[None, :]
        sizes = (heads, key_dim, value_dim)
        kept, state = first_state(states, slots, positions, sequence, head, start, place, column, both, sizes, keeps)
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        group = head // shared * key_dim
        index = tl.arange(0, CHUNK)
        for first in range(start, end, CHUNK):
            token = first + index
            exists = token < end
            raw = tl.load(a + token * a_stride + head, mask=exists, other=0.0)
            each = tl.where(exists, decay_of(raw, bias, rate), 0.0)
            decay = tl.cumsum(each, 0)
            whole = tl.sum(each, 0)
            opening = tl.load(b + token * b_stride + head, mask=exists, other=0.0).to(tl.float32)
            strength = tl.where(exists, 1.0 / (1.0 + tl.exp(-opening)), 0.0)
            rows = exists[:, None] & inside[None, :]
            keys = tl.load(k + token[:, None] * k_stride + group + place[None, :], mask=rows, other=0.0)
            keys = _direction(keys, eps, 1.0, 1)
            values = tl.load(
                v + token[:, None] * v_stride + head * value_dim + column[None, :],
                mask=exists[:, None] & held[None, :],
                other=0.0,
            ).to(tl.float32)
            seen = index[:, None] >= index[None, :]
            between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], -float("inf")))
            before = tl.exp(decay)[:, None]
            alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
            system = tl.where(index[:, None] > index[None, :], strength[:, None] * alike * between, 0.0)
            put = strength[:, None] * (values - before * tl.dot(keys, state, input_precision=PRECISION))
            # Forward substitution: once a row is known, those below lose their part of it.
            for row in range(CHUNK):
                known = tl.sum(tl.where(index[:, None] == row, put, 0.0), 0)
                weight = tl.sum(tl.where(index[None, :] == row, system, 0.0), 1)
                put -= weight[:, None] * known[None, :]
            queries = tl.load(q + token[:, None] * q_stride + group + place[None, :], mask=rows, other=0.0)
            queries = _direction(queries, eps, factor, 1)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
            found = tl.dot(queries * before, state, input_precision=PRECISION)
            found = tl.dot(scores, put, found, input_precision=PRECISION)
            target = result + (token[:, None] * heads + head) * value_dim + column[None, :]
            tl.store(target, found.to(result.dtype.element_ty), mask=exists[:, None] & held[None, :])
            left = keys * tl.exp(whole - decay)[:, None]
            state = tl.dot(tl.trans(left), put, state * tl.exp(whole), input_precision=PRECISION)
        tl.store(kept, state, mask=both & (keeps != 0))


_CHUNK = 16  # with more, the system and the state do not fit into registers


def supports(call: GatedDeltaCall) -> bool:
    """Rows of any distance, whose own elements stand side by side; states in float32."""
    q, k, v, a, b, _, _, batch, layer = call
    whole = all(one.stride(1) == one.shape[2] and one.stride(2) == 1 for one in (q, k, v))
    kept = batch.states is None or batch.states.tensors[layer][STATE].dtype == torch.float32
    return whole and kept and a.stride(1) == b.stride(1) == 1 and v.dtype != torch.float64 and k.shape[2] <= 256


def takes_chunks(call: GatedDeltaCall) -> bool:
    """As `supports`, where a sequence is long enough."""
    return call.batch.longest >= thresholds(call.v.device).chunked_tokens and supports(call)


def launch(call: GatedDeltaCall, chunks: bool) -> Tensor:
    v, batch = call.v, call.batch
    key_heads, key_dim = call.k.shape[1:]
    heads, value_dim = v.shape[1:]
    result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not result.numel():
        return result
    kept, slots = states_and_slots(batch, call.layer, v)
    padded, columns = tile_of(key_dim, value_dim, chunks)
    tile: dict[str, Any] = {"KEY_DIM": padded, "COLUMNS": columns}
    grid = (batch.offsets.shape[0] - 1, heads, ceil_div(value_dim, columns))
    if chunks:
        tile |= {"CHUNK": _CHUNK, "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32"}
    (gated_delta_chunks_kernel if chunks else gated_delta_kernel)[grid](
        *call[:7],
        *(kept, slots, batch.offsets, batch.positions, result),
        *(heads, key_dim, value_dim, heads // key_heads, *(one.stride(0) for one in call[:5])),
        *(LENGTH_EPS, key_dim**-0.5, int(batch.states is not None)),
        **tile,
        num_warps=4,
    )
    return result
