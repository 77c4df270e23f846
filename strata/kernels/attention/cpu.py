"""Attention on a CPU: library kernels over views of the pools, or over tiles of keys and values that fit the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from strata.kernels.attention.cpu_plan import AttentionPlan, DecodeGroup, PromptChunk, plan
from strata.kernels.attention.spec import AttentionCall, pages_of
from strata.kernels.state.paged import PagedKV


def planned(pages: PagedKV, offsets: Tensor, dtype: torch.dtype, windows: Iterable[int | None] = (None,)) -> PagedKV:
    """`pages` with the plan of this step's attention on a CPU, of a model of `dtype` whose layers use these windows."""
    # All layers that keep rows in these pages have the same shapes; the others have none there.
    keys = next(keys for keys in pages.keys if keys.numel())
    tables, used = pages.tables, None
    if pages.is_quantized:
        counts = -(-pages.lengths // pages.page_size)
        is_used = torch.arange(tables.shape[1]) < counts[:, None]
        # What stands past a sequence's pages may be any number.
        used, places = torch.unique(tables.masked_fill(~is_used, 0).long(), return_inverse=True)
        tables = places.int()
    return dataclasses.replace(pages, plan=plan(offsets, pages.lengths, tables, keys, dtype, windows, used))


def _plan(pages: PagedKV, offsets: Tensor, dtype: torch.dtype, window: int | None) -> AttentionPlan:
    if pages.plan is not None and window in pages.plan.schedules:
        return pages.plan
    made = planned(pages, offsets, dtype, (window,)).plan
    assert made is not None
    return made


def paged(call: AttentionCall) -> Tensor:
    """Queries of a mixed batch against the pools; no more than a tile (or one sequence) is copied at a time.

    Of pools in 8 bits, all pages of the batch are widened first.
    """
    q, k, v, batch, spec, sinks = call
    pages, layer, scale = pages_of(batch), spec.layer, spec.scale
    made = _plan(pages, batch.offsets, q.dtype, spec.window)
    work = made.schedules[spec.window]
    pools = (pages.keys[layer], pages.values[layer]) if made.used is None else pages.rows(layer, made.used, q.dtype)
    keys, values = (pool.view(-1, *k.shape[1:]) for pool in pools)
    if not work.chunks and not work.padded and len(work.groups) == 1 and isinstance(work.groups[0].rows, slice):
        return _decode(q, keys, values, work.groups[0], scale, sinks)
    out = q.new_zeros(q.shape) if work.padded else q.new_empty(q.shape)
    for group in work.groups:
        if isinstance(group.rows, slice):
            out[group.rows] = _decode(q[group.rows], keys, values, group, scale, sinks)
        else:
            out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), keys, values, group, scale, sinks))
    for chunk in work.chunks:
        _prefill(out, q, k, v, keys, values, chunk, scale, sinks)
    return out


def _stage(keys: Tensor, values: Tensor, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values at `slots`: views where those lie in a row, else copies."""
    if isinstance(slots, slice):
        return keys[slots], values[slots]
    # One allocation for both: glibc returns two large neighbours to the system as soon as they are free, and every
    # layer would fault their pages in again.
    staged_keys, staged_values = keys.new_empty((2, len(slots), *keys.shape[1:]))
    torch.index_select(keys, 0, slots, out=staged_keys)
    torch.index_select(values, 0, slots, out=staged_values)
    return staged_keys, staged_values


def _decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scale: float, sinks: Tensor | None) -> Tensor:
    """One query a sequence: the query heads of one KV head are the rows of one product."""
    heads, dim = keys.shape[1:]
    shape = (group.sequences, -1, heads, dim)
    k, v = (x.view(shape).transpose(1, 2) for x in _stage(keys, values, group.slots))
    rows = q.unflatten(1, (heads, -1))
    if sinks is None:
        return sdpa(rows, k, v, attn_mask=group.mask, scale=scale).reshape(q.shape)
    return _with_sinks(rows, k, v, group.mask, False, scale, sinks.view(heads, -1)).reshape(q.shape)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, sinks: Tensor
) -> Tensor:
    """Attention of q [sequences, heads, queries, head_dim] by the library; sinks: [heads, queries or 1].

    The library tells the logarithm l of a row's sum of exponentials; a sink of s leaves the row 1 / (1 + e^(s - l)).
    """
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    shared: Tensor = out * torch.sigmoid(sums - sinks)[..., None]
    return shared.to(q.dtype)


def _prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: PromptChunk,
    scale: float,
    sinks: Tensor | None,
) -> None:
    if chunk.slots is None:
        k, v = k[chunk.rows], v[chunk.rows]
    else:
        k, v = _stage(keys, values, chunk.slots)
    q, out = q[chunk.rows], out[chunk.rows]
    for tile in chunk.tiles:
        query, key, value = (x.transpose(0, 1)[None] for x in (q[tile.rows], k[tile.keys], v[tile.keys]))
        causal = tile.mask is None
        if sinks is None:
            result = sdpa(query, key, value, attn_mask=tile.mask, is_causal=causal, scale=scale, enable_gqa=True)
        else:
            result = _with_sinks(query, key, value, tile.mask, causal, scale, sinks[:, None])
        out[tile.rows] = result[0].transpose(0, 1)
