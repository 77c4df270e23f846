"""Latent attention on a CPU, by what attends over keys and values: a row is one key of all heads, and their value."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from strata.kernels.attention import cpu as attention_cpu
from strata.kernels.attention.cpu_plan import QUERY_ROWS
from strata.kernels.attention.exact import attend_exact
from strata.kernels.attention.spec import AttentionBatch, AttentionCall, Sequences
from strata.kernels.latent.forms import Dims, LatentCall, alike, by_head, expanded
from strata.kernels.linear.batch_invariant import buffered_linear
from strata.kernels.state.paged import PagedKV

# Keys and values of some heads of one sequence that are made at a time.
EXPANDED_BYTES = 64 << 20


def supports(call: LatentCall) -> bool:
    return call.batch.pages is not None and call.pages.keys[call.spec.layer].dtype == call.q.dtype


def paged(call: LatentCall) -> Tensor:
    """Of each sequence the form with fewer FLOPs."""
    q, row, weight, batch, spec = call
    dims, pages = call.dims, call.pages
    bounds, totals = batch.offsets.tolist(), pages.lengths.tolist()
    new = [last - first for first, last in pairwise(bounds)]
    long = [s for s, (own, total) in enumerate(zip(new, totals, strict=True)) if own <= total and own > 1]
    long = [s for s in long if not dims.absorbs(new[s], totals[s])]
    if not long:
        return _absorbed(call)
    out = q.new_zeros((q.shape[0], dims.heads, dims.value))
    short = [s for s in range(len(new)) if s not in long]
    if short:
        tokens = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in short])
        part = _some(batch, pages, short, [new[s] for s in short])
        out[tokens] = _absorbed(LatentCall(q[tokens], row[tokens], weight, part, spec))
    for s in long:
        rows = slice(bounds[s], bounds[s + 1])
        own = row[rows] if new[s] == totals[s] else _rows(pages, spec.layer, s, totals[s])
        for heads in _blocks_of_heads(dims, totals[s], q.element_size()):
            some = weight.view(dims.heads, -1, dims.rank)[heads].flatten(0, 1)
            made = expanded(own, some, dims._replace(heads=heads.stop - heads.start))
            _expanded(out[rows, heads], q[rows, heads], *made, spec.scale)
    return out


def _blocks_of_heads(dims: Dims, total: int, itemsize: int) -> list[slice]:
    """Heads that are expanded together, so that keys and values of long sequences find room."""
    each = total * (dims.nope + dims.rope + dims.value) * itemsize
    count = max(1, min(dims.heads, EXPANDED_BYTES // each))
    return [slice(first, min(first + count, dims.heads)) for first in range(0, dims.heads, count)]


def _some(batch: AttentionBatch, pages: PagedKV, sequences: list[int], new: list[int]) -> Sequences:
    """These sequences alone."""
    index = torch.tensor(sequences)
    some = replace(pages, tables=pages.tables[index], lengths=pages.lengths[index], plan=None, index=None)
    offsets = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Sequences(offsets, max(new), some)


def _rows(pages: PagedKV, layer: int, sequence: int, total: int) -> Tensor:
    """[total, rank + rope], the rows of one sequence."""
    used = pages.tables[sequence, : -(-total // pages.page_size)].long()
    return pages.keys[layer][used].flatten(0, 2)[:total]


def _expanded(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """The queries of one sequence, the last of its tokens, over keys and values of each head; into out."""
    value = v.shape[-1]
    q, k, v = (x.transpose(0, 1)[None] for x in alike(q, k, v))
    new, total = q.shape[2], k.shape[2]
    if new == total:
        out.copy_(sdpa(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)[..., :value])
        return
    for start in range(0, new, QUERY_ROWS):
        rows = slice(start, min(start + QUERY_ROWS, new))
        end = total - new + rows.stop
        seen = torch.ones(rows.stop - start, end, dtype=torch.bool).tril_(total - new + start)
        result = sdpa(q[:, :, rows], k[:, :, :end], v[:, :, :end], attn_mask=seen, scale=scale)
        out[rows] = result[0].transpose(0, 1)[..., :value]


def _absorbed(call: LatentCall) -> Tensor:
    q, row, weight, batch, spec = call
    dims = call.dims
    keys, values = by_head(weight, dims)
    latent = torch.einsum("thd,hdr->thr", q[..., : dims.nope], keys)
    queries = torch.cat((latent, q[..., dims.nope :]), -1)
    mixed = attention_cpu.paged(AttentionCall(queries, row[:, None], row[:, None], _rows_as_values(batch), spec))
    return torch.einsum("thr,hvr->thv", mixed[..., : dims.rank], values)


def batch_invariant_tiles(call: LatentCall) -> Tensor:
    """Always absorbed, with products whose shape never changes: bits do not depend on the batch or on chunks."""
    q, row, weight, batch, spec = call
    dims = call.dims
    keys, values = by_head(weight, dims)
    latent = _by_head(q[..., : dims.nope], keys.transpose(1, 2))
    queries = torch.cat((latent, q[..., dims.nope :]), -1)
    mixed = attend_exact(AttentionCall(queries, row[:, None], row[:, None], _rows_as_values(batch), spec))
    return _by_head(mixed[..., : dims.rank], values)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, width], weight [heads, out, width] -> [tokens, heads, out]."""
    return torch.stack([buffered_linear(x[:, head], own) for head, own in enumerate(weight)], 1)


def _rows_as_values(batch: AttentionBatch) -> Sequences:
    pages = batch.pages
    return Sequences(batch.offsets, batch.longest, None if pages is None else replace(pages, values=pages.keys))
