"""Attention to the keys that a rank keeps, where ranks divide the tokens of each sequence (decode context parallelism,
Helix, Bhatia et al. 2025): what it finds, and what joins that with what the other ranks find.

Attention to the keys that a rank keeps, on CUDA: the kernels of `attention` over pages, which tell their sums too.

Grids follow from shapes alone, so that a step can be captured in a CUDA graph.

Attention to the keys that a rank keeps, on a CPU, by the library's kernel that tells the sums of exponentials.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.cpu_plan import QUERY_ROWS
from strata.kernels.attention.mixed import may_decode
from strata.kernels.attention.spec import DcpCall, pages_of
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.op import operation
from strata.kernels.state.dcp_shard import DcpShard


def supports_on_cpu(call: DcpCall) -> bool:
    dtype, pages = call.q.dtype, call.batch.pages
    return dtype in (torch.float32, torch.bfloat16) and pages is not None and pages.holds(call.spec.layer, dtype)


def attend_on_cpu(call: DcpCall) -> tuple[Tensor, Tensor]:
    """One sequence after another; of a prompt so many queries at once that the mask stays small."""
    q, _, _, batch, spec, kept = call
    pages = pages_of(batch)
    out = torch.zeros(q.shape, dtype=torch.float32)
    sums = torch.full(q.shape[:2], -torch.inf)
    lengths = pages.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        total, new = lengths[sequence], last - first
        here = kept.count(total)
        if not 0 < new <= total or here <= 0:
            continue
        used = pages.tables[sequence, : -(-here // pages.page_size)].long()
        key, value = (rows.flatten(0, 1)[:here] for rows in pages.rows(spec.layer, used, q.dtype))
        # The first queries of a sequence may see none of the keys here.
        blind = max(0, kept.rank + new - total)
        for start in range(blind, new, QUERY_ROWS):
            rows = slice(first + start, first + min(start + QUERY_ROWS, new))
            seen = kept.count(torch.arange(total - new + start, total - new + rows.stop - first) + 1)
            out[rows], sums[rows] = _attend_in_order(q[rows], key, value, seen, spec.scale)
    return out, sums


def _attend_in_order(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [queries, heads, head_dim], of which the i-th sees the first seen[i] >= 1 of k and v."""
    kv_heads, most = k.shape[1], int(seen[-1])
    group = q.shape[1] // kv_heads
    rows = q.unflatten(1, (kv_heads, group)).permute(1, 0, 2, 3).flatten(1, 2)[None]
    keys, values = (one[:most].transpose(0, 1)[None] for one in (k, v))
    mask = None
    if int(seen[0]) < most:
        hidden = torch.arange(most) >= seen.repeat_interleave(group)[:, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)[None, None]
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    found = out[0].unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
    return found.float(), sums[0].unflatten(1, (-1, group)).permute(1, 0, 2).flatten(1, 2)


def supports(call: DcpCall) -> bool:
    pages = call.batch.pages
    is_plain = pages is not None and not pages.is_quantized
    return is_plain and attention_cuda.supports(call) and attention_cuda.fits_decode(call)


def _decodes(call: DcpCall) -> int:
    """How many sequences, the first of the batch, get the programs of a decode."""
    pages = pages_of(call.batch)
    if attention_cuda.all_decode(call):
        return call.q.shape[0]
    return 0 if pages.parts is None else may_decode(pages)


def kernels(call: DcpCall) -> tuple[Any, ...]:
    decodes = attention_cuda.decode_kernels(call, _decodes(call))
    return decodes if attention_cuda.all_decode(call) else (*decodes, attention_kernel)


def scratch(call: DcpCall) -> int:
    """What the splits of decodes wait in."""
    return attention_cuda.decode_scratch(call, _decodes(call))


def attend(call: DcpCall) -> tuple[Tensor, Tensor]:
    """Decodes in splits of their keys, prompts in tiles of their queries."""
    q, k, v, batch, spec, kept = call
    pages = pages_of(batch)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    count = _decodes(call)
    every, parts = attention_cuda.all_decode(call), pages.parts
    if count:
        rows = slice(0, count)
        own = pages
        if not every:
            assert parts is not None
            own = replace(pages, tables=pages.tables[rows], lengths=parts.decode_lengths[rows])
        decode_attention_cuda.decode(
            q[rows].flatten(1), q.shape[1], q.shape[2], own, spec, out=out[rows], sums=sums[rows], kept=kept
        )
    if not every:
        starts, bounds = (batch.offsets, None) if parts is None else (parts.starts, parts.bounds)
        attention_cuda.prefill(out, q, k, v, starts, batch, spec, bounds, sums=sums, kept=kept)
    return out, sums


def pairs_and_keys(workload: Workload, kept: DcpShard) -> tuple[int, int]:
    """How many queries and keys of a step see one another here, and how many keys here its sequences have."""
    pairs = keys = 0
    for new, total in zip(workload.new, workload.total, strict=True):
        pairs += kept.pairs(total) - kept.pairs(total - new)
        keys += kept.count(total) if new else 0
    return pairs, keys


def _cost(call: DcpCall, *, workload: Workload) -> Cost:
    q, pages = call.q, pages_of(call.batch)
    pairs, keys = pairs_and_keys(workload, call.kept)
    heads, dim = q.shape[1:]
    pool = pages.keys[call.spec.layer]
    cached = 2 * keys * pool.shape[-2] * dim * pool.element_size()
    rows = workload.tokens * heads
    wide = max(4, q.element_size())
    written = rows * (dim + 1) * wide
    return Cost(4 * heads * dim * pairs, rows * dim * q.element_size() + cached, written, cached=cached)


def _meta(call: DcpCall) -> tuple[Tensor, Tensor]:
    q = call.q
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide, device="meta"), q.new_empty(q.shape[:2], dtype=wide, device="meta")


@operation(_cost, operands=DcpCall, meta=_meta, reads_state=True)
def dcp_attention(call: DcpCall) -> tuple[Tensor, Tensor]:
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


dcp_attention.implement("by sequence", "cpu", invariant=True, supports=supports_on_cpu)(attend_on_cpu)
dcp_attention.in_triton(attend, supports=supports, kernels=kernels, scratch=scratch)
