"""Deterministic attention on CUDA: a token's bits are the same in any batch, prefilled or decoded, chunked or whole.

Prompts run in one launch, decoding sequences in another that gives the same bits with the keys divided among programs;
grids follow from shapes alone, so that a step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention.fixed_triton import fixed_decode_kernel
from strata.kernels.attention.softmax_triton import PART_KEYS, PARTS, part_at
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.attention.varlen_triton import LOG2_E, attention_kernel, head_pad, invariant_tile
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.split_counters import MOST_COUNTERS, split_counters
from strata.kernels.state.paged import PagedKV


def supports(call: AttentionCall) -> bool:
    # The kernels find the largest score before they scale it.
    return call.spec.scale > 0 and attention_cuda.supports(call)


def kernels(call: AttentionCall) -> tuple[Any, ...]:
    batch, pages = call.batch, call.batch.pages
    decodes = 0 if pages is None else _decodes(batch.offsets.shape[0] - 1, batch.longest, pages, call.k.shape[1])
    return (fixed_decode_kernel,) * (decodes > 0) + (attention_kernel,) * (decodes < len(call.q))


def attend(call: AttentionCall) -> Tensor:
    """As `attention`. Which of the two kernels takes a sequence does not change its bits."""
    q, k, v, batch, spec, sinks = call
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    offsets, pages = batch.offsets, batch.pages
    decodes, sequences = 0, offsets.shape[0] - 1
    if pages is not None:
        decodes = _decodes(sequences, batch.longest, pages, k.shape[1])
        if decodes:
            held = pages.sequences(0, decodes)
            _decode(out[:decodes], q[:decodes], offsets[: decodes + 1], held, spec, sinks)
        pages = pages.sequences(decodes, sequences)
    if decodes < len(q):
        others = Sequences(offsets[decodes:], batch.longest, pages)
        attention_cuda.prefill(out, q, k, v, others.offsets, others, spec, sinks=sinks, invariant=True)
    return out


def _decodes(sequences: int, longest: int, pages: PagedKV, kv_heads: int) -> int:
    """How many sequences at the start of the batch are known to have one token each, and get programs for each part."""
    known = sequences if longest == 1 else (pages.parts.decodes or 0) if pages.parts is not None else 0
    return known if known * kv_heads <= MOST_COUNTERS else 0


def _parts(most_keys: int) -> int:
    """Into how many parts a sequence of so many keys is divided."""
    return int(part_at.fn(max(most_keys - 1, 0), PART_KEYS, PARTS)) + 1


def scratch_bytes(sequences: int, most_keys: int, heads: int, head_dim: int) -> int:
    """What the parts of decoding sequences wait in, where a sequence may have so many keys."""
    return 4 * sequences * _parts(most_keys) * heads * (head_dim + 2)


def _decode(out: Tensor, q: Tensor, offsets: Tensor, pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> None:
    sequences, heads, head_dim = q.shape
    keys, values, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.tables
    kv_heads = keys.shape[2]
    parts = _parts(tables.shape[1] * pages.page_size)
    scores = torch.empty((2, sequences, parts, heads), dtype=torch.float32, device=q.device)
    results = torch.empty((sequences, parts, heads, head_dim), dtype=torch.float32, device=q.device)
    tile = invariant_tile(head_dim, q.dtype, decode=True)
    fixed_decode_kernel[(kv_heads, parts, sequences)](
        *(q, keys, values, *pages.exponents(spec.layer), out, *scores, results, split_counters(q.device)),
        *(offsets, pages.lengths, tables, sinks),
        *(spec.scale * LOG2_E, q.stride(0), kv_heads * head_dim, kv_heads * head_dim, tables.stride(0)),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=pages.page_size,
        WINDOW=spec.window or 0,
        PART_KEYS=PART_KEYS,
        PARTS=PARTS,
        JOIN_ROWS=next_power_of_2(heads // kv_heads),
        UNROLL=4,
        **tile.options,
    )
