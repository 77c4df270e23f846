"""Attention in which decoding sequences see the pages whose keys could score most, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse import decodes_cuda
from strata.kernels.attention.sparse.by_sequence import by_sequence, over_chosen
from strata.kernels.attention.sparse.page_choice import PageChoice, chosen_pages, page_scores, write_bounds
from strata.kernels.attention.spec import SparseCall, pages_of
from strata.kernels.op import operation


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
    if call.batch.pages is not None:
        write_bounds(call.batch.pages, call.batch.offsets, call.spec.layer)
    return by_sequence(call, whole, _decode)


def _decode(call: SparseCall[PageChoice], total: int) -> Tensor | None:
    """One token of one sequence, over the pages that each KV head has chosen."""
    q, k, pages, count = call.q, call.k, pages_of(call.batch), call.choice.pages
    size, group = pages.page_size, q.shape[1] // k.shape[1]
    if len(q) != 1 or total <= count * size:
        return None
    out, table = torch.empty_like(q), pages.tables[0, : -(-total // size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    for kv_head in range(k.shape[1]):
        members = slice(kv_head * group, (kv_head + 1) * group)
        bounds = pages.bounds[call.spec.layer][table][:, :, kv_head].to(precision)
        used = chosen_pages(page_scores(q[0, members].to(precision) * call.spec.scale, bounds), count)
        out[:, members] = over_chosen(call, kv_head, slice(0, 1), table[used], count * size - (-total % size))
    return out


page_sparse_attention.implement("pages", "cpu")(partial(_attend, whole=attention.bind("cpu")))
page_sparse_attention.in_triton(decodes_cuda.attend, supports=decodes_cuda.supports, kernels=decodes_cuda.kernels)
