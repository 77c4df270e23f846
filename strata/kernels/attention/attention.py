"""Causal attention of packed sequences, over their own keys or over the KV pools.

Softmax attention is Vaswani et al. 2017, grouped query heads Ainslie et al. 2023, the pools PagedAttention (Kwon et al.
2023), the sliding window Longformer's (Beltagy et al. 2020) in Mistral's causal form, the learned sinks gpt-oss's
(OpenAI 2025).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import batch_invariant as attention_fixed
from strata.kernels.attention import cpu as attention_cpu
from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import exact as attention_exact
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention import train as attention_train
from strata.kernels.attention.spec import AttentionCall
from strata.kernels.op import operation


def _cost(call: AttentionCall, *, workload: Workload) -> Cost:
    window, pages = call.spec.window, call.batch.pages
    pairs = keys = 0
    for new, total in zip(workload.new, workload.total, strict=True):
        pairs += _visible(total, window) - _visible(total - new, window)
        first = 0 if window is None else max(0, total - new + 1 - window)
        keys += total - first if new else 0
    heads, dim = call.q.shape[1:]
    pool = call.k if pages is None else pages.keys[call.spec.layer]
    rows = workload.tokens * heads * dim * call.q.element_size()
    exponent = 1 if pages is not None and pages.is_quantized else 0
    key_bytes = 2 * keys * pool.shape[-2] * (dim * pool.element_size() + exponent)
    weights = 0 if call.sinks is None else call.sinks.nbytes
    return Cost(4 * heads * dim * pairs, rows + key_bytes + weights, rows, weights, cached=key_bytes)


def _visible(length: int, window: int | None) -> int:
    """Query-key pairs of the first `length` positions: position p sees min(p + 1, window) keys."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * (window or 0)


def _backward_cost(call: AttentionCall, *, workload: Workload) -> Cost:
    """Of its result, too, each row is multiplied by the gradient of that (Dao et al. 2022, algorithm 4)."""
    cost = _cost(call, workload=workload)
    read = cost.read + 2 * cost.written
    return Cost(2 * cost.flops, read, cost.read, cost.weights, cached=cost.cached)


@operation(_cost, operands=AttentionCall, reads_state=True, attends=True, backward=_backward_cost)
def attention(call: AttentionCall) -> Tensor:
    """Each query over the keys of its own sequence at its own position and before.

    Returns [tokens, heads, head_dim] in q's dtype; scores and softmax are float32 (float64 for float64 input). Rows of
    a sequence with length 0 are unspecified.
    """
    q, k, v, batch, spec, sinks = call
    pages, layer, window = batch.pages, spec.layer, spec.window
    lengths = None if pages is None else pages.lengths.tolist()
    group = q.shape[1] // k.shape[1]
    precision = torch.promote_types(q.dtype, torch.float32)
    parts = []
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        total = last - first if lengths is None else lengths[sequence]
        if total < last - first:
            parts.append(torch.zeros_like(q[first:last]))
            continue
        if pages is None:
            key, value = k[first:last], v[first:last]
        else:
            used = pages.tables[sequence, : -(-total // pages.page_size)].long()
            key, value = (rows.flatten(0, 1)[:total] for rows in pages.rows(layer, used, precision))
        key, value = (x.to(precision).repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].to(precision), key) * spec.scale
        at = torch.arange(total - (last - first), total, device=q.device)[:, None]
        keys_at = torch.arange(total, device=q.device)
        hidden = keys_at > at
        if window is not None:
            hidden |= keys_at <= at - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            own = sinks.to(precision)[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, own), -1)
        weights = scores.softmax(-1)[..., :total]
        parts.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype))
    return torch.cat(parts) if parts else torch.empty_like(q)


def _in_pools(call: AttentionCall) -> bool:
    pages = call.batch.pages
    return pages is not None and (pages.is_quantized or pages.keys[call.spec.layer].dtype == call.q.dtype)


def _packed(call: AttentionCall) -> bool:
    return call.batch.pages is None


attention.implement("tiled", "cpu", supports=_in_pools)(attention_cpu.paged)
attention.implement("packed", "cpu", differentiable=True, supports=_packed)(attention_train.whole_sequences)
attention.implement("batch-invariant tiles", "cpu", invariant=True)(attention_exact.attend_exact)
for _name, _of in (("mixed", attention_mixed), ("triton", attention_cuda)):
    attention.in_triton(_of.attend, _name, supports=_of.supports, kernels=_of.kernels, scratch=_of.scratch)
attention.in_triton(
    attention_fixed.attend,
    "triton fixed",
    invariant=True,
    supports=attention_fixed.supports,
    kernels=attention_fixed.kernels,
)
attention.implement("cudnn", "cuda", differentiable=True, supports=attention_train.dense_supports)(
    attention_train.dense
)
attention.implement("flash", "cuda", differentiable=True, supports=attention_train.supports)(attention_train.flash)
attention.implement("packed", "cuda", differentiable=True, supports=_packed)(attention_train.whole_sequences)
