"""Sparse attention as references and CPUs compute it: sequence after sequence, over pages that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import Sequences, SparseCall, pages_of
from strata.kernels.state.paged import PagedKV


def by_sequence(
    call: SparseCall[Any], whole: Callable[..., Tensor], sparse: Callable[[SparseCall[Any], int], Tensor | None]
) -> Tensor:
    """sparse: of the call of one sequence, and how many keys it has, the results; None: the sequence sees all keys.
    whole: `attention`, for these."""
    q, k, v, batch, spec, choice, sinks = call
    pages = batch.pages
    if pages is None:
        return whole(*call.whole)
    out, lengths = torch.empty_like(q), pages.lengths.tolist()
    for at, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        step = Sequences(batch.offsets[at : at + 2] - first, last - first, pages.sequences(at, at + 1))
        own = SparseCall(q[first:last], k[first:last], v[first:last], step, spec, choice, sinks)
        found = sparse(own, lengths[at])
        out[first:last] = whole(*own.whole) if found is None else found
    return out


def over_chosen(call: SparseCall[Any], kv_head: int, rows: slice, table: Tensor, length: int) -> Tensor:
    """Queries of one sequence, of the heads that share a KV head: to these it is a sequence of so many keys in the
    pages of `table`."""
    q, k, v, batch, spec, _, sinks = call
    pages, group = pages_of(batch), q.shape[1] // k.shape[1]
    own, members = slice(kv_head, kv_head + 1), slice(kv_head * group, (kv_head + 1) * group)
    pools = [(pool[spec.layer][:, :, own],) for pool in (pages.keys, pages.values)]
    seen = PagedKV(pools[0], pools[1], table[None], torch.tensor([length]), pages.slot_mapping)
    count = rows.stop - rows.start
    given = q[rows, members], k[rows, own], v[rows, own], Sequences(torch.tensor([0, count]), count, seen)
    found: Tensor = attention.reference(*given, spec._replace(layer=0), None if sinks is None else sinks[members])
    return found
