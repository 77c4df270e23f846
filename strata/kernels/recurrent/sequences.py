"""What recurrent operations are given besides their activations: the sequences of a step, and the states they keep.

The convolution of a layer keeps the first of the tensors that the layer declares, its recurrence the second.

What the recurrences over a state of fixed size are called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.state.recurrent import RecurrentStates

# Places in `RecurrentStates.tensors[layer]`.
TAIL, STATE = 0, 1


class RecurrentBatch(Protocol):
    """The sequences of a step, as a `Batch` has them.

    positions: [tokens] int32 of each token in its own sequence. offsets: [sequences + 1] int32, where each one's tokens
    begin. longest: the most tokens of one. states: what sequences have kept; None when each stands whole in the batch.
    """

    @property
    def positions(self) -> Tensor: ...

    @property
    def offsets(self) -> Tensor: ...

    @property
    def longest(self) -> int: ...

    @property
    def states(self) -> RecurrentStates | None: ...


def first_states(batch: RecurrentBatch, layer: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The states [sequences, *shape] from which the sequences of a batch begin, in the dtype and on the device of
    `like`: zeros for a sequence whose first token here has position 0, and for all where nothing is kept."""
    sequences = batch.offsets.shape[0] - 1
    if batch.states is None:
        return like.new_zeros(sequences, *shape)
    held = batch.states.tensors[layer][place].index_select(0, batch.states.slots).to(like.dtype)
    return torch.where(begins_here(batch).view(-1, *(1,) * len(shape)), held.new_zeros(()), held)


def keep_states(batch: RecurrentBatch, layer: int, place: int, last: Tensor) -> None:
    """Put the states [sequences, ...] behind the last tokens into the rows of their sequences, of those that have
    tokens here."""
    if batch.states is None:
        return
    pool, slots = batch.states.tensors[layer][place], batch.states.slots.long()
    runs = batch.offsets[1:] > batch.offsets[:-1]
    held = pool.index_select(0, slots)
    chosen = torch.where(runs.view(-1, *(1,) * (last.dim() - 1)), last.detach().to(pool.dtype), held)
    pool.index_copy_(0, slots, chosen)


def states_and_slots(batch: RecurrentBatch, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The states of recurrences and the rows of a batch's sequences in them, for kernels; where nothing is kept, they
    touch none of what stands for these."""
    if batch.states is None:
        return like.new_empty(0, dtype=torch.float32), batch.offsets
    return batch.states.tensors[layer][STATE], batch.states.slots


def begins_here(batch: RecurrentBatch) -> Tensor:
    """[sequences] whether each begins here; unspecified for one without tokens."""
    if not batch.positions.shape[0]:
        return torch.ones_like(batch.offsets[:-1], dtype=torch.bool)
    first = batch.offsets[:-1].clamp(max=batch.positions.shape[0] - 1)
    return batch.positions.index_select(0, first) == 0


def chunk_rows(batch: RecurrentBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Of `count` tokens of each sequence, from its `first` on, the rows [sequences, count] in the batch, and which of
    them there are; a row that is none is 0."""
    rows = batch.offsets[:-1, None].long() + torch.arange(first, first + count, device=batch.offsets.device)
    exists = rows < batch.offsets[1:, None]
    return torch.where(exists, rows, 0), exists


def of_chunk(x: Tensor, rows: Tensor, exists: Tensor) -> Tensor:
    """What `x` [tokens, heads, ...] has in a chunk, [sequences, heads, count, ...]. Zeros where there is no token: row
    0 is another sequence's and may hold NaN."""
    found = x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    there = exists.view(*exists.shape, *(1,) * (found.dim() - 2))
    return torch.where(there, found, found.new_zeros(())).transpose(1, 2)


def chunk_places(batch: RecurrentBatch, count: int) -> Tensor:
    """[tokens] where each token of the batch stands among the rows of all chunks of `count`, one after another, each
    with [sequences, count] rows."""
    token = torch.arange(batch.positions.shape[0], device=batch.offsets.device)
    sequence = torch.searchsorted(batch.offsets[1:].long(), token, right=True)
    inside = token - batch.offsets.long()[sequence]
    sequences = batch.offsets.shape[0] - 1
    return (inside // count * sequences + sequence) * count + inside % count


def spans(batch: RecurrentBatch) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the tokens of each sequence, on the host: for references and CPUs."""
    return pairwise(batch.offsets.tolist())


def state_cost(pool: Tensor, workload: Workload) -> Cost:
    """Reading and writing the rows [rows, *shape] of the sequences that run; those that begin here are not read."""
    size = pool[0].nbytes
    read = size * sum(new > 0 and total > new for new, total in zip(workload.new, workload.total, strict=True))
    written = size * sum(new > 0 for new in workload.new)
    return Cost(read=read, written=written, cached=read + written)


class StateSpaceSpec(NamedTuple):
    """What is the same in every call of one layer. layer: whose states are kept. least, most: bounds of a time step."""

    layer: int
    least: float
    most: float


class StateSpaceCall(NamedTuple):
    """The operands of `state_space`. x: [tokens, heads, head_dim]; dt: [tokens, heads]; b, c: [tokens, groups,
    state_size], group h // (heads // groups) serving head h; dt_bias, a_log, skip: [heads]."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    dt_bias: Tensor
    a_log: Tensor
    skip: Tensor
    batch: RecurrentBatch
    spec: StateSpaceSpec


class GatedDeltaCall(NamedTuple):
    """The operands of `gated_delta`. q, k: [tokens, key_heads, key_dim], key head h // (heads // key_heads) serves head
    h; v: [tokens, heads, value_dim]; a, b: [tokens, heads]; dt_bias, a_log: [heads]. layer: whose states are kept."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    dt_bias: Tensor
    a_log: Tensor
    batch: RecurrentBatch
    layer: int
