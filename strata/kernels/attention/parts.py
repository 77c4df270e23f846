"""Attention of a step with prompts on CUDA, part by part, each with the kernel that suits it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention.batch_parts import BatchParts, LibraryCall
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.join import attention_join_kernel, join
from strata.kernels.attention.library_plans import library_plans
from strata.kernels.attention.spec import AttentionSpec, PackedBatch, Sequences
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.op import ATEN, CUDNN
from strata.kernels.state.kv_read import kv_read, kv_read_kernel
from strata.kernels.state.paged import PagedKV

# Cached keys that are read out of the pages at once, a multiple of the block of `batch_parts`: it bounds the memory.
MOST_KEYS = 8192


def supports(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> bool:
    pages = batch.pages
    return (
        pages is not None
        and isinstance(pages.parts, BatchParts)
        and batch.longest > 1
        and attention_cuda.supports(q, k, v, batch, spec)
        and (not pages.parts.library or all(_aligned(x) for x in (q, k, v)))
    )


def kernels(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> tuple[Any, ...]:
    """Rows that lie side by side are moved by a copy, which is no kernel."""
    assert batch.pages is not None
    parts = batch.pages.parts
    assert isinstance(parts, BatchParts)
    found: list[Any] = [decode_attention_kernel] * (parts.decodes > 0)
    for call in parts.library:
        found += [ATEN, kv_read_kernel, CUDNN] if call.lead else [CUDNN]
        rounds = -(-(call.cached - call.lead) // MOST_KEYS)
        found += [kv_read_kernel, CUDNN, attention_join_kernel] * rounds
    return (*found, *[attention_kernel] * (parts.left > 0))


def _aligned(x: Tensor) -> bool:
    """Whether every head starts at a multiple of 16 bytes, where head_dim itself is a multiple of 8."""
    return x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0


def attend(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    """Decoding sequences with split keys, long prompts by cuDNN, the other rows by the kernel over pages."""
    pages = batch.pages
    assert pages is not None
    parts = pages.parts
    assert isinstance(parts, BatchParts)
    if len(parts.library) == 1 and not (parts.decodes or parts.left or parts.library[0].cached):
        return _cudnn(q, k, v, parts.library[0].sequences, spec.scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if parts.decodes:
        rows, ends = slice(0, parts.decodes), batch.offsets[: parts.decodes + 1]
        decodes = Sequences(ends, 1, pages.sequences(0, parts.decodes))
        out[rows] = attention_cuda.attend(q[rows], k[rows], v[rows], decodes, spec)
    for call in parts.library:
        _attend_by_library(out, q, k, v, call, pages, spec)
    if parts.left:
        attention_cuda.prefill(out, q, k, v, parts.starts, batch, spec)
    return out


def _attend_by_library(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: LibraryCall, pages: PagedKV, spec: AttentionSpec
) -> None:
    """New queries over new keys, with the cached keys that fill no block, and over the blocks before; then joined.

    The cached tokens of the first part get queries too, of unspecified content, which makes it plainly causal.
    """
    layer, scale = spec.layer, spec.scale
    rows = slice(call.row, call.row + call.sequences * call.rows)
    queries, keys, values = q[rows], k[rows], v[rows]
    lead, blocks = call.lead, call.cached - call.lead
    if lead:
        queries = torch.empty((lead + call.rows, *q.shape[1:]), dtype=q.dtype, device=q.device)
        queries[lead:] = q[rows]
        keys, values = kv_read(pages, layer, call.sequence, blocks, call.cached + call.rows)
    if not blocks:
        out[rows] = _cudnn(queries, keys, values, call.sequences, scale)[lead:]
        return
    found, sums = _cudnn_summed(queries, keys, values, scale, causal=True)
    found, sums = found[lead:], sums[:, lead:]
    for first in range(0, blocks, MOST_KEYS):
        before = kv_read(pages, layer, call.sequence, first, min(first + MOST_KEYS, blocks))
        other, other_sums = _cudnn_summed(queries, *before, scale, causal=False)
        sums = join(out[rows], found, other[lead:], sums, other_sums[:, lead:])
        found = out[rows]


def _cudnn(queries: Tensor, keys: Tensor, values: Tensor, sequences: int, scale: float) -> Tensor:
    """Causal attention of sequences of equal length, one after the other: [tokens, heads, head_dim]."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (queries, keys, values))
    library_plans().use(q, k, v, causal=True, summed=False)
    result: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, True, False, scale=scale
    )[0]
    return result.transpose(1, 2).flatten(0, 1)


def _cudnn_summed(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The attention of one sequence [tokens, heads, head_dim], and the log-sum-exps of the scores [heads, tokens]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    library_plans().use(q, k, v, causal=causal, summed=True)
    result, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return result[0].transpose(0, 1).contiguous(), sums.view(-1, queries.shape[0])
