"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024): a state decays and, at a key, takes up what is put there.

One operation for prompts, single tokens and both in a step. A chunk of tokens solves one triangular system for what
each of them puts into the state (section 3.3 there, after Yang et al. 2024, "Parallelizing linear transformers with the
delta rule"), and the rest are products; over single tokens it is the recurrence itself.
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
from strata.kernels.recurrent import delta_chunks_cuda, gated_delta_triton
from strata.kernels.recurrent.gated_delta_triton import LENGTH_EPS
from strata.kernels.recurrent.sequences import (
    STATE,
    GatedDeltaCall,
    chunk_places,
    chunk_rows,
    first_states,
    keep_states,
    of_chunk,
    state_cost,
)


def _cost(call: GatedDeltaCall, *, workload: Workload) -> Cost:
    """Of the recurrence: an element of the state decays, is read at the key (2), takes its part (2), is read at the
    query (2); chunks do more, as products. A value is corrected (2). The decay is a sum, softplus (3), a product and an
    exponential, the strength a sigmoid (4). Queries and keys are squared, added up and scaled, queries once more."""
    q, k, v, a, b, dt_bias, a_log, batch, layer = call
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    flops = tokens * (heads * (7 * key_dim * value_dim + 2 * value_dim + 10) + key_heads * 7 * key_dim)
    weights = dt_bias.nbytes + a_log.nbytes
    read = q.nbytes + k.nbytes + v.nbytes + a.nbytes + b.nbytes + weights
    found = Cost(flops, read, v.numel() * v.element_size(), weights)
    return found if batch.states is None else found + state_cost(batch.states.tensors[layer][STATE], workload)


def _meta(call: GatedDeltaCall) -> Tensor:
    return call.v.new_empty(call.v.shape, device="meta")


@operation(_cost, operands=GatedDeltaCall, meta=_meta, mutates=("batch",), reads_state=True, recurrent=True)
def gated_delta(call: GatedDeltaCall) -> Tensor:
    """In each sequence and head, with `g[t] = -exp(a_log) softplus(a[t] + dt_bias)`, `beta[t] = sigmoid(b[t])`, and
    queries and keys of length 1, queries divided by the root of key_dim too:

    `S = exp(g[t]) S[t-1]`, `S[t] = S + k[t] (beta[t] (v[t] - S^T k[t]))^T`, and the result `S[t]^T q[t]`.

    S begins with what the sequence has kept, `batch.states.tensors
    [layer][1]` of shape [rows, heads, key_dim, value_dim], and with zeros at position 0; in the end it stands there.
    Returns [tokens, heads, value_dim] in v's dtype; all of it is float32 (float64 for float64). Without `batch.states`
    all sequences begin here and nothing is kept.
    """
    return _recurrence(call, *_FUNCTIONS)


def _directions(q: Tensor, k: Tensor, heads: int, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and keys as each head reads them, of length 1; queries divided by the root of their dimensions."""
    found = []
    for one, factor in ((q, q.shape[2] ** -0.5), (k, 1.0)):
        wide = one.to(precision)
        scaled = wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS) * factor)
        found.append(scaled.repeat_interleave(heads // one.shape[1], 1))
    return found[0], found[1]


# Of gates, as torch has them, and with bits that do not depend on an element's place.
Function = Callable[[Tensor], Tensor]
_FUNCTIONS: tuple[Function, Function, Function] = F.softplus, torch.exp, torch.sigmoid
_IN_BLOCKS = tuple(map(in_blocks, _FUNCTIONS))


def _gates(
    call: GatedDeltaCall, precision: torch.dtype, softplus: Function, exp: Function, sigmoid: Function
) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and strengths."""
    a, b, dt_bias, a_log = (one.to(precision) for one in call[3:7])
    return -exp(a_log) * softplus(a + dt_bias), sigmoid(b)


_CHUNK = 64


def _chunks(call: GatedDeltaCall) -> Tensor:
    """Chunk after chunk, all sequences side by side. Differentiable."""
    q, k, v, *_, batch, layer = call
    precision = torch.promote_types(v.dtype, torch.float32)
    tokens, heads, value_dim = v.shape
    state = first_states(batch, layer, STATE, (heads, k.shape[2], value_dim), v.new_empty(0, dtype=precision))
    if not tokens:
        return v
    q, k = _directions(q, k, heads, precision)
    decays, strengths = _gates(call, precision, *_FUNCTIONS)
    wide = v.to(precision)
    count: int = min(_CHUNK, batch.longest)
    future = torch.ones(count, count, dtype=torch.bool, device=v.device).triu(1)
    own = torch.eye(count, dtype=precision, device=v.device)
    parts = []
    for first in range(0, batch.longest, count):
        rows, exists = chunk_rows(batch, first, count)
        queries, keys, values = (of_chunk(one, rows, exists) for one in (q, k, wide))
        # What is no token neither decays nor puts anything into the state.
        strength = of_chunk(strengths, rows, exists)[..., None]
        # Differences of sums: in float64 they are as exact as sums of a few.
        decay = of_chunk(decays, rows, exists).double().cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).to(precision).exp()
        before = decay.to(precision).exp()[..., None]
        system = (own + (strength * (keys @ keys.transpose(-1, -2)) * between)).tril()
        known = strength * (values - before * (keys @ state))
        put = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        scores = (queries @ keys.transpose(-1, -2)) * between
        found = before * (queries @ state) + scores @ put
        parts.append(found.transpose(1, 2).flatten(0, 1))
        left = (decay[..., -1:] - decay).to(precision).exp()[..., None]
        state = before[..., -1:, :] * state + (keys * left).transpose(-1, -2) @ put
    keep_states(batch, layer, STATE, state)
    return torch.cat(parts).index_select(0, chunk_places(batch, count)).to(v.dtype)


def _recurrence(call: GatedDeltaCall, softplus: Function, exp: Function, sigmoid: Function) -> Tensor:
    """Token after token, all sequences side by side, each element on its own: with functions whose bits depend on no
    others, neither do these on other sequences nor on how a prompt was divided."""
    q, k, v, *_, batch, layer = call
    precision = torch.promote_types(v.dtype, torch.float32)
    dtype, (heads, value_dim) = v.dtype, v.shape[1:]
    state = first_states(batch, layer, STATE, (heads, k.shape[2], value_dim), v.new_empty(0, dtype=precision))
    q, k = _directions(q, k, heads, precision)
    logarithms, strengths = _gates(call, precision, softplus, exp, sigmoid)
    decays = exp(logarithms)
    v = v.to(precision)
    result = torch.empty_like(v)
    for position in range(batch.longest):
        rows, exists = chunk_rows(batch, position, 1)
        runs = exists[:, 0].nonzero().flatten()
        at = rows[runs, 0]
        left = decays[at, :, None, None] * state[runs]
        # Columns side by side, so that each sum is over neighbours, in an order of its own.
        read = (left.transpose(-1, -2) * k[at, :, None]).contiguous().sum(-1)
        change = strengths[at, :, None] * (v[at] - read)
        now = left + k[at, :, :, None] * change[:, :, None]
        result[at] = (now.transpose(-1, -2) * q[at, :, None]).contiguous().sum(-1)
        state[runs] = now
    keep_states(batch, layer, STATE, state)
    return result.to(dtype)


gated_delta.implement("chunks", "cpu", differentiable=True)(_chunks)
gated_delta.implement("recurrence", "cpu", invariant=True)(lambda call: _recurrence(call, *_IN_BLOCKS))
gated_delta.in_triton(
    delta_chunks_cuda.launch,
    "triton parallel chunks",
    supports=delta_chunks_cuda.supports,
    kernels=delta_chunks_cuda.KERNELS,
    scratch=delta_chunks_cuda.scratch,
)
gated_delta.in_triton(
    partial(gated_delta_triton.launch, chunks=True),
    "triton chunks",
    supports=gated_delta_triton.takes_chunks,
    kernels=(gated_delta_triton.gated_delta_chunks_kernel,),
)
gated_delta.in_triton(
    partial(gated_delta_triton.launch, chunks=False),
    "triton recurrence",
    invariant=True,
    supports=gated_delta_triton.supports,
    kernels=(gated_delta_triton.gated_delta_kernel,),
)
gated_delta.implement("chunks", "cuda", differentiable=True)(_chunks)
