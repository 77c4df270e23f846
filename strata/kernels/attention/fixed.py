"""Deterministic attention on CUDA: a token's bits are the same in any batch, prefilled or decoded, chunked or whole.

Prompts run in one launch, decoding sequences in another that gives the same bits with the keys divided among programs;
grids follow from shapes alone, so that a step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention.fixed_triton import (
    PART_KEYS,
    PARTS,
    decode_tile,
    fixed_decode_kernel,
    fixed_prefill_kernel,
    join_constants,
    part_at,
    prefill_tile,
    shape_constants,
)
from strata.kernels.attention.spec import AttentionCall, AttentionSpec
from strata.kernels.attention.varlen_triton import LOG2_E
from strata.kernels.split_counters import MOST_COUNTERS, split_counters
from strata.kernels.state.paged import PagedKV


def supports(call: AttentionCall) -> bool:
    # The kernels find the largest score before they scale it.
    return call.spec.scale > 0 and attention_cuda.supports(call)


def kernels(call: AttentionCall) -> tuple[Any, ...]:
    batch, pages = call.batch, call.batch.pages
    decodes = 0 if pages is None else _decodes(batch.offsets.shape[0] - 1, batch.longest, pages, call.k.shape[1])
    return (fixed_decode_kernel,) * (decodes > 0) + (fixed_prefill_kernel,) * (decodes < len(call.q))


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
        _prefill(out[decodes:], q[decodes:], k, v, offsets[decodes:], pages, spec, sinks)
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


def _prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    pages: PagedKV | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if pages is None:
        lengths, tables, table_stride, page_size = offsets, offsets, 0, 0
        k_stride, v_stride = k.stride(0), v.stride(0)
        exponents: tuple[Tensor | None, Tensor | None] = (None, None)
    else:
        k, v, lengths, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.lengths, pages.tables
        table_stride, page_size, exponents = tables.stride(0), pages.page_size, pages.exponents(spec.layer)
        k_stride = v_stride = kv_heads * head_dim
    sequences, group = offsets.shape[0] - 1, heads // kv_heads
    tile = prefill_tile(head_dim, q.dtype)
    fixed_prefill_kernel[(kv_heads, tokens // (tile.rows // group) + sequences)](
        q,
        k,
        v,
        *exponents,
        out,
        offsets,
        lengths,
        tables,
        q if sinks is None else sinks,
        sequences,
        spec.scale * LOG2_E,
        q.stride(0),
        k_stride,
        v_stride,
        table_stride,
        GROUP=group,
        PAGE_SIZE=page_size,
        SINKS=sinks is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shape_constants(head_dim, spec.window or 0),
    )


def _decode(out: Tensor, q: Tensor, offsets: Tensor, pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> None:
    sequences, heads, head_dim = q.shape
    keys, values, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.tables
    kv_heads = keys.shape[2]
    parts = _parts(tables.shape[1] * pages.page_size)
    scores = torch.empty((2, sequences, parts, heads), dtype=torch.float32, device=q.device)
    results = torch.empty((sequences, parts, heads, head_dim), dtype=torch.float32, device=q.device)
    tile = decode_tile(head_dim, q.dtype)
    fixed_decode_kernel[(kv_heads, parts, sequences)](
        q,
        keys,
        values,
        *pages.exponents(spec.layer),
        out,
        scores[0],
        scores[1],
        results,
        split_counters(q.device),
        offsets,
        pages.lengths,
        tables,
        q if sinks is None else sinks,
        spec.scale * LOG2_E,
        q.stride(0),
        kv_heads * head_dim,
        kv_heads * head_dim,
        tables.stride(0),
        GROUP=heads // kv_heads,
        PAGE_SIZE=pages.page_size,
        SINKS=sinks is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shape_constants(head_dim, spec.window or 0),
        **join_constants(heads // kv_heads),
    )
