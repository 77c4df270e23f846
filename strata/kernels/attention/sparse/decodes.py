"""Attention in which decoding sequences see the pages whose keys could score most, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse import decodes_cuda
from strata.kernels.attention.sparse.page_choice import PageChoice, chosen_pages, page_scores, write_bounds
from strata.kernels.attention.spec import AttentionSpec, Sequences, SparseCall
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import HAS_TRITON


def _cost(call: SparseCall[PageChoice], *, workload: Workload) -> Cost:
    """Decodes over their chosen pages, and over the bounds of all; of pages that are written, the bounds are, from all
    keys in them."""
    q, k, pages = call.q, call.k, call.batch.pages
    if pages is None:
        return attention.cost(*call.whole, workload=workload)
    size, kept = pages.page_size, call.choice.pages * pages.page_size
    cut = [min(total, kept) if new == 1 else total for new, total in zip(workload.new, workload.total, strict=True)]
    cost = attention.cost(*call.whole, workload=Workload(workload.new, tuple(cut)))
    heads, row = q.shape[1], k.shape[1] * k.shape[2] * k.element_size()
    looked = sum(-(-total // size) for total, less in zip(workload.total, cut, strict=True) if less < total)
    written = sum(-(-new // size) for new in workload.new)
    seen, found = 2 * looked * row, written * size * row
    return cost + Cost(4 * heads * q.shape[2] * looked, seen + found, 2 * written * row, cached=seen)


@operation(_cost, operands=SparseCall, mutates=("batch",), reads_state=True)
def page_sparse_attention(call: SparseCall[PageChoice]) -> Tensor:
    """As `attention` over pages, where the query of a sequence with one new token sees the keys of `choice.pages` of
    its pages, for each KV head its own; others see all.

    The bounds of pages that this step wrote are written (`PagedKV.bounds`), so each step of a sequence has to run this
    in the layer. spec: without a window. Without pages all keys are seen.
    """
    return _attend(call, attention.reference)


def _attend(call: SparseCall[PageChoice], whole: Callable[..., Tensor]) -> Tensor:
    """whole: `attention`, for sequences that see all keys."""
    q, k, v, batch, spec, choice, sinks = call
    pages = batch.pages
    if pages is None:
        return whole(*call.whole)
    write_bounds(pages, batch.offsets, spec.layer)
    out = torch.empty_like(q)
    lengths = pages.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        own, given = pages.sequences(sequence, sequence + 1), (q[first:last], k[first:last], v[first:last])
        if last - first != 1 or lengths[sequence] <= choice.pages * pages.page_size:
            offsets = batch.offsets[sequence : sequence + 2] - first
            out[first:last] = whole(*given, Sequences(offsets, last - first, own), spec, sinks)
        else:
            out[first:last] = _decode(*given, own, lengths[sequence], spec, choice, sinks)
    return out


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PagedKV,
    total: int,
    spec: AttentionSpec,
    choice: PageChoice,
    sinks: Tensor | None,
) -> Tensor:
    """One token of one sequence: to each KV head that is a sequence of the chosen pages."""
    out, size, group = torch.empty_like(q), pages.page_size, q.shape[1] // k.shape[1]
    table = pages.tables[0, : -(-total // size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    length = torch.tensor([choice.pages * size - (-total % size)])
    for kv_head in range(k.shape[1]):
        own, members = slice(kv_head, kv_head + 1), slice(kv_head * group, (kv_head + 1) * group)
        bounds = pages.bounds[spec.layer][table][:, :, kv_head].to(precision)
        used = chosen_pages(page_scores(q[0, members].to(precision) * spec.scale, bounds), choice.pages)
        pools = [(pool[spec.layer][:, :, own],) for pool in (pages.keys, pages.values)]
        seen = PagedKV(pools[0], pools[1], table[used][None], length, pages.slot_mapping)
        part = Sequences(torch.tensor([0, 1]), 1, seen)
        given = (q[:, members], k[:, own], v[:, own], part, spec._replace(layer=0))
        out[:, members] = attention.reference(*given, None if sinks is None else sinks[members])
    return out


@page_sparse_attention.implement("pages", "cpu")
def _on_cpu(call: SparseCall[PageChoice]) -> Tensor:
    return _attend(call, attention.bind("cpu"))


if HAS_TRITON:
    page_sparse_attention.implement("triton", "cuda", supports=decodes_cuda.supports, kernels=decodes_cuda.kernels)(
        decodes_cuda.attend
    )
