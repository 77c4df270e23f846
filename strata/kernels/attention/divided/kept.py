"""Attention to the keys that a rank keeps, where ranks divide the tokens of each sequence (decode context parallelism,
Helix, Bhatia et al. 2025): what it finds, and what joins that with what the other ranks find.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.divided import kept_cpu, kept_cuda
from strata.kernels.attention.spec import KeptCall, pages_of
from strata.kernels.op import operation
from strata.kernels.state.kept_keys import KeptKeys


def pairs_and_keys(workload: Workload, kept: KeptKeys) -> tuple[int, int]:
    """How many queries and keys of a step see one another here, and how many keys here its sequences have."""
    pairs = keys = 0
    for new, total in zip(workload.new, workload.total, strict=True):
        pairs += kept.pairs(total) - kept.pairs(total - new)
        keys += kept.count(total) if new else 0
    return pairs, keys


def _cost(call: KeptCall, *, workload: Workload) -> Cost:
    q, pages = call.q, pages_of(call.batch)
    pairs, keys = pairs_and_keys(workload, call.kept)
    heads, dim = q.shape[1:]
    pool = pages.keys[call.spec.layer]
    cached = 2 * keys * pool.shape[-2] * dim * pool.element_size()
    rows = workload.tokens * heads
    wide = max(4, q.element_size())
    written = rows * (dim + 1) * wide
    return Cost(4 * heads * dim * pairs, rows * dim * q.element_size() + cached, written, cached=cached)


def _meta(call: KeptCall) -> tuple[Tensor, Tensor]:
    q = call.q
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide, device="meta"), q.new_empty(q.shape[:2], dtype=wide, device="meta")


@operation(_cost, operands=KeptCall, meta=_meta, reads_state=True)
def kept_attention(call: KeptCall) -> tuple[Tensor, Tensor]:
    """Each query over the keys of its own sequence that `kept` says are here, at its own position and before.

    Returns the softmax's average of the values [tokens, heads, head_dim] and the log of the sum of the exponentials of
    the scores [tokens, heads], both float32 (float64 for float64); zeros and -inf for a query that sees no key here.
    Rows of a sequence with length 0 are unspecified.
    """
    q, k, _, batch, spec, kept = call
    pages = pages_of(batch)
    out, sums = (torch.empty_like(one, device=q.device) for one in _meta(call))
    out.zero_()
    sums.fill_(-torch.inf)
    group = q.shape[1] // k.shape[1]
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        total = int(pages.lengths[sequence])
        here = kept.count(total)
        if total < last - first or here <= 0:
            continue
        used = pages.tables[sequence, : -(-here // pages.page_size)].long()
        key, value = (
            rows.flatten(0, 1)[:here].to(out.dtype).repeat_interleave(group, dim=1)
            for rows in pages.rows(spec.layer, used, out.dtype)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].to(out.dtype), key) * spec.scale
        at = torch.arange(total - (last - first), total, device=q.device)[:, None]
        keys_at = torch.arange(here, device=q.device) * kept.ranks + kept.rank
        scores = scores.masked_fill(keys_at > at, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # of a query that sees nothing
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, value)
        sums[first:last] = scores.logsumexp(-1).t()
    return out, sums


kept_attention.implement("by sequence", "cpu", invariant=True, supports=kept_cpu.supports)(kept_cpu.attend)
kept_attention.in_triton(
    kept_cuda.attend, supports=kept_cuda.supports, kernels=kept_cuda.kernels, scratch=kept_cuda.scratch
)
