"""The state space of Mamba-2 (Dao and Gu 2024): a state of fixed size that decays by a number a head and token.

One operation for prompts, single tokens and both in a step. Over chunks of tokens it is attention within a chunk, and a
product with the state before it (section 6 there); over single tokens it is the recurrence itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_blocks
from strata.kernels.op import operation
from strata.kernels.recurrent import state_space_triton
from strata.kernels.recurrent.sequences import (
    STATE,
    StateSpaceCall,
    chunk_places,
    chunk_rows,
    first_states,
    keep_states,
    of_chunk,
    state_cost,
)


def _cost(call: StateSpaceCall, *, workload: Workload) -> Cost:
    """Of the recurrence: an element of the state decays, takes up its part of the input, and gives its part of the
    result; chunks do more, as products. A time step is a sum, softplus (3), its product with A, an exponential."""
    x, dt, b, c, dt_bias, a_log, skip, batch, spec = call
    tokens, heads, head_dim = x.shape
    each = 5 * head_dim * b.shape[-1] + 3 * head_dim + 6
    weights = dt_bias.nbytes + a_log.nbytes + skip.nbytes
    read = x.nbytes + dt.nbytes + b.nbytes + c.nbytes + weights
    found = Cost(tokens * heads * each, read, x.numel() * x.element_size(), weights)
    return found if batch.states is None else found + state_cost(batch.states.tensors[spec.layer][STATE], workload)


@operation(_cost, operands=StateSpaceCall, mutates=("batch",), reads_state=True, recurrent=True)
def state_space(call: StateSpaceCall) -> Tensor:
    """In each sequence and head, with `s[t] = clamp(softplus(dt[t] + dt_bias), least, most)` and `A = -exp(a_log)`:

    `S[t] = exp(s[t] A) S[t-1] + s[t] x[t] b[t]^T`, and the result `y[t] = S[t] c[t] + skip x[t]`.

    S begins with what the sequence has kept, `batch.states.tensors
    [layer][1]` of shape [rows, heads, head_dim, state_size], and with zeros at position 0; in the end it stands there.
    Returns [tokens, heads, head_dim] in x's dtype; all of it is float32 (float64 for float64). Without `batch.states`
    all sequences begin here and nothing is kept. transformers' Mamba2 clamps time steps in prompts only; here as there
    the last token of a prompt and the next one are computed alike only if no bound is hit.
    """
    return _recurrence(call, *_FUNCTIONS)


# Of time steps and decays, as torch has them, and with bits that do not depend on an element's place.
Function = Callable[[Tensor], Tensor]
_FUNCTIONS: tuple[Function, Function] = F.softplus, torch.exp
_IN_BLOCKS = tuple(map(in_blocks, _FUNCTIONS))


def _steps(call: StateSpaceCall, precision: torch.dtype, softplus: Function, exp: Function) -> tuple[Tensor, Tensor]:
    """Time steps, and the rates by which states decay in them."""
    steps = softplus(call.dt.to(precision) + call.dt_bias.to(precision)).clamp(call.spec.least, call.spec.most)
    return steps, -exp(call.a_log.to(precision))


def _of_heads(x: Tensor, heads: int, precision: torch.dtype) -> Tensor:
    """[tokens, groups, state_size] as each head reads it."""
    return x.to(precision).repeat_interleave(heads // x.shape[1], 1)


_CHUNK = 64


def _chunks(call: StateSpaceCall) -> Tensor:
    """Chunk after chunk, all sequences side by side. Differentiable."""
    x, _, b, c, _, _, skip, batch, spec = call
    precision = torch.promote_types(x.dtype, torch.float32)
    tokens, heads, head_dim = x.shape
    groups = b.shape[1]
    state = first_states(batch, spec.layer, STATE, (heads, head_dim, b.shape[-1]), x.new_empty(0, dtype=precision))
    if not tokens:
        return x
    steps, rates = _steps(call, precision, *_FUNCTIONS)
    wide, b, c = x.to(precision), b.to(precision), c.to(precision)
    count: int = min(_CHUNK, batch.longest)
    parts = []
    for first in range(0, batch.longest, count):
        rows, exists = chunk_rows(batch, first, count)
        step, values, keys, queries = (of_chunk(one, rows, exists) for one in (steps, wide, b, c))
        # Differences of sums: in float64 they are as exact as sums of a few.
        decay = (step.double() * rates.double()[:, None]).cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).to(precision)
        hidden = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        weights = between.masked_fill(hidden, -torch.inf).exp() * step[..., None, :]
        scores = (queries @ keys.transpose(-1, -2)).repeat_interleave(heads // groups, 1) * weights
        keys, queries = (one.repeat_interleave(heads // groups, 1) for one in (keys, queries))
        before = (queries * decay.to(precision).exp()[..., None]) @ state.transpose(-1, -2)
        parts.append((scores @ values + before).transpose(1, 2).flatten(0, 1))
        left = (decay[..., -1:] - decay).to(precision).exp() * step
        taken = (values * left[..., None]).transpose(-1, -2) @ keys
        state = decay[..., -1].to(precision).exp()[..., None, None] * state + taken
    keep_states(batch, spec.layer, STATE, state)
    found = torch.cat(parts).index_select(0, chunk_places(batch, count))
    return (found + skip.to(precision)[:, None] * wide).to(x.dtype)


def _recurrence(call: StateSpaceCall, softplus: Function, exp: Function) -> Tensor:
    """Token after token, all sequences side by side, each element on its own: with functions whose bits depend on no
    others, neither do these on other sequences nor on how a prompt was divided."""
    x, _, b, c, _, _, skip, batch, spec = call
    precision = torch.promote_types(x.dtype, torch.float32)
    _tokens, heads, head_dim = x.shape
    state = first_states(batch, spec.layer, STATE, (heads, head_dim, b.shape[-1]), x.new_empty(0, dtype=precision))
    wide = x.to(precision)
    steps, rates = _steps(call, precision, softplus, exp)
    decays = exp(steps * rates)
    b, c = _of_heads(b, heads, precision), _of_heads(c, heads, precision)
    scaled = wide * steps[..., None]
    result = wide * skip.to(precision)[:, None]
    for position in range(batch.longest):
        rows, exists = chunk_rows(batch, position, 1)
        runs = exists[:, 0].nonzero().flatten()
        at = rows[runs, 0]
        taken = scaled[at, :, :, None] * b[at, :, None]
        now = state[runs] * decays[at, :, None, None] + taken
        result[at] += (now * c[at, :, None]).sum(-1)
        state[runs] = now
    keep_states(batch, spec.layer, STATE, state)
    return result.to(x.dtype)


state_space.implement("chunks", "cpu", differentiable=True)(_chunks)
state_space.implement("recurrence", "cpu", invariant=True)(lambda call: _recurrence(call, *_IN_BLOCKS))
state_space.in_triton(
    partial(state_space_triton.launch, chunks=True),
    "triton chunks",
    supports=state_space_triton.takes_chunks,
    kernels=(state_space_triton.state_space_chunks_kernel,),
)
state_space.in_triton(
    partial(state_space_triton.launch, chunks=False),
    "triton recurrence",
    invariant=True,
    supports=state_space_triton.supports,
    kernels=(state_space_triton.state_space_kernel,),
)
state_space.implement("chunks", "cuda", differentiable=True)(_chunks)
