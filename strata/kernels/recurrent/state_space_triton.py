"""Mamba-2's state space in Triton: token after token, or chunk after chunk with products on tensor cores.

Programs take one head of one sequence, or some of its columns, and keep their part of the state in registers from the
sequence's first token to its last. So nothing is read twice, chunks never span sequences, and no scratch memory is
asked for; a single long prompt fills heads * head_dim / columns processors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.recurrent.sequences import STATE, StateSpaceCall, states_and_slots
from strata.kernels.triton_import import jit, tl


@jit
def first_state(states, slots, positions, sequence, head, start, row, column, both, sizes, keeps):
    """Where a part of a head's state [rows, columns] is kept, and what it begins with: zeros if nothing is kept. both:
    which of row and column there are; sizes: of heads, rows and columns."""
    heads, rows, columns = sizes
    slot = tl.load(slots + sequence).to(tl.int64)
    kept = states + (slot * heads + head) * rows * columns
    kept += row[:, None] * columns + column[None, :]
    is_old = (keeps != 0) & (tl.load(positions + start) != 0)
    return kept, tl.load(kept, mask=both & is_old, other=0.0)


@jit
def _time_step(dt, bias, least, most):
    """softplus(dt + bias) within its bounds; past 20 softplus is the number itself."""
    raw = dt.to(tl.float32) + bias
    soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return tl.minimum(tl.maximum(soft, least), most)


# The recurrence is one binary for all batches, with states or without, of rows at any address: another one could lay
# the state out in another way among threads and add up in another order.
_UNSPECIALIZED = ("slots", "offsets", "positions", "keeps")
_ROWS = ("x", "dt", "b", "c", "x_stride", "dt_stride", "b_stride", "c_stride")


@partial(jit, unspecialized=(*_UNSPECIALIZED, *_ROWS))
def state_space_kernel(
    x,
    dt,
    b,
    c,
    dt_bias,
    a_log,
    skip,
    states,
    slots,
    offsets,
    positions,
    result,
    heads,
    head_dim,
    state_size,
    shared,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    least,
    most,
    keeps,
    COLUMNS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
):
    """Programs [sequences, heads, head_dim / COLUMNS]: a token after another. `shared` heads read one group."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.arange(0, STATE_SIZE)
        held, inside = column < head_dim, place < state_size
        both = held[:, None] & inside[None, :]
        sizes = (heads, head_dim, state_size)
        kept, state = first_state(states, slots, positions, sequence, head, start, column, place, both, sizes, keeps)
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        factor = tl.load(skip + head).to(tl.float32)
        group = head // shared * state_size
        for token in range(start, end):
            step = _time_step(tl.load(dt + token * dt_stride + head), bias, least, most)
            value = tl.load(x + token * x_stride + head * head_dim + column, mask=held, other=0.0).to(tl.float32)
            key = tl.load(b + token * b_stride + group + place, mask=inside, other=0.0).to(tl.float32)
            query = tl.load(c + token * c_stride + group + place, mask=inside, other=0.0).to(tl.float32)
            state = state * tl.exp(step * rate) + (step * value)[:, None] * key[None, :]
            found = tl.sum(state * query[None, :], 1) + factor * value
            target = result + (token * heads + head) * head_dim + column
            tl.store(target, found.to(result.dtype.element_ty), mask=held)
        tl.store(kept, state, mask=both & (keeps != 0))


@partial(jit, unspecialized=_UNSPECIALIZED)
def state_space_chunks_kernel(
    x,
    dt,
    b,
    c,
    dt_bias,
    a_log,
    skip,
    states,
    slots,
    offsets,
    positions,
    result,
    heads,
    head_dim,
    state_size,
    shared,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    least,
    most,
    keeps,
    COLUMNS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs [sequences, heads, head_dim / COLUMNS]: CHUNK tokens after CHUNK. PRECISION: of products in float32."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if start < end:
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        place = tl.arange(0, STATE_SIZE)
        held, inside = column < head_dim, place < state_size
        both = held[:, None] & inside[None, :]
        sizes = (heads, head_dim, state_size)
        kept, state = first_state(states, slots, positions, sequence, head, start, column, place, both, sizes, keeps)
        rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        factor = tl.load(skip + head).to(tl.float32)
        group = head // shared * state_size
        index = tl.arange(0, CHUNK)
        for first in range(start, end, CHUNK):
            token = first + index
            exists = token < end
            raw = tl.load(dt + token * dt_stride + head, mask=exists, other=0.0)
            step = tl.where(exists, _time_step(raw, bias, least, most), 0.0)
            decay = tl.cumsum(step * rate, 0)
            whole = tl.sum(step * rate, 0)
            values = tl.load(
                x + token[:, None] * x_stride + head * head_dim + column[None, :],
                mask=exists[:, None] & held[None, :],
                other=0.0,
            )
            rows = exists[:, None] & inside[None, :]
            keys = tl.load(b + token[:, None] * b_stride + group + place[None, :], mask=rows, other=0.0)
            queries = tl.load(c + token[:, None] * c_stride + group + place[None, :], mask=rows, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            seen = index[:, None] >= index[None, :]
            between = tl.where(seen, decay[:, None] - decay[None, :], -float("inf"))
            scores = scores * tl.exp(between) * step[None, :]
            wide = values.to(tl.float32)
            found = tl.dot(scores, wide, input_precision=PRECISION)
            behind = queries.to(tl.float32) * tl.exp(decay)[:, None]
            found = tl.dot(behind, tl.trans(state), found, input_precision=PRECISION)
            found += factor * wide
            target = result + (token[:, None] * heads + head) * head_dim + column[None, :]
            tl.store(target, found.to(result.dtype.element_ty), mask=exists[:, None] & held[None, :])
            left = wide * (tl.exp(whole - decay) * step)[:, None]
            state = state * tl.exp(whole)
            state = tl.dot(tl.trans(left), keys.to(tl.float32), state, input_precision=PRECISION)
        tl.store(kept, state, mask=both & (keeps != 0))


_CHUNK = 32


def tile_of(whole: int, divided: int, chunks: bool) -> tuple[int, int]:
    """Of a state the padded size that programs have whole, and how much of the other each has: together 4,096 numbers,
    or half of them where it has no products."""
    padded, least = max(16, next_power_of_2(whole)), 16 if chunks else 1
    return padded, min(max(least, next_power_of_2(divided)), max(least, (4096 if chunks else 2048) // padded))


def supports(call: StateSpaceCall) -> bool:
    """Rows of any distance, whose own elements stand side by side; states in float32."""
    x, dt, b, c, _, _, _, batch, spec = call
    whole = all(one.stride(1) == one.shape[2] and one.stride(2) == 1 for one in (x, b, c)) and dt.stride(1) == 1
    kept = batch.states is None or batch.states.tensors[spec.layer][STATE].dtype == torch.float32
    return whole and kept and x.dtype != torch.float64 and b.shape[2] <= 256


def takes_chunks(call: StateSpaceCall) -> bool:
    """As `supports`, where a sequence is long enough."""
    return call.batch.longest >= thresholds(call.x.device).chunked_tokens and supports(call)


def launch(call: StateSpaceCall, chunks: bool) -> Tensor:
    x, batch, spec = call.x, call.batch, call.spec
    tokens, heads, head_dim = x.shape
    groups, state_size = call.b.shape[1:]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return result
    kept, slots = states_and_slots(batch, spec.layer, x)
    padded, columns = tile_of(state_size, head_dim, chunks)
    tile: dict[str, Any] = {"COLUMNS": columns, "STATE_SIZE": padded}
    grid = (batch.offsets.shape[0] - 1, heads, ceil_div(head_dim, columns))
    if chunks:
        tile |= {"CHUNK": _CHUNK, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
    (state_space_chunks_kernel if chunks else state_space_kernel)[grid](
        *call[:7],
        *(kept, slots, batch.offsets, batch.positions, result),
        *(heads, head_dim, state_size, heads // groups, *(one.stride(0) for one in call[:4])),
        *(spec.least, spec.most, int(batch.states is not None)),
        **tile,
        num_warps=4,
    )
    return result
