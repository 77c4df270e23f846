"""Attention of queries to a part of their keys, with what joins several parts, and the gradients of a part.

Blockwise attention (Liu and Abbeel 2023) of packed sequences. On CUDA cuDNN, where sequences are of one length, or
FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.train import DENSE_MULTIPLE
from strata.kernels.op import operation
from strata.kernels.plain_tensor import all_plain


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys the queries of each sequence see: all that are given of it or, causal, the first n to the n-th query.

    q_offsets, k_offsets: [sequences + 1] int32, where the queries and the keys of each sequence begin. Each has some of
    both, and as many if causal. max_queries, max_keys: of a sequence.
    """

    q_offsets: Tensor
    k_offsets: Tensor
    max_queries: int
    max_keys: int
    causal: bool

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Rows of queries and keys, sequence by sequence. Waits for the device."""
        both = (pairwise(offsets.tolist()) for offsets in (self.q_offsets, self.k_offsets))
        for own, others in zip(*both, strict=True):
            yield slice(*own), slice(*others)

    def pairs(self, workload: Workload) -> int:
        """How many are seen. workload: of each sequence its queries (new) and its keys (total)."""
        each = zip(workload.new, workload.total, strict=True)
        return sum(new * (new + 1) // 2 if self.causal else new * total for new, total in each)


class PartialCall(NamedTuple):
    """The operands of `partial_attention`. q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim], which are
    given of each sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    part: VisibleKeys
    scale: float


class PartialGradientsCall(NamedTuple):
    """The operands of `partial_attention_gradients`. slope: the gradient of out. out, sums: those of all parts joined.
    Others: of the call of `partial_attention`."""

    slope: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    sums: Tensor
    part: VisibleKeys
    scale: float


def _cost(call: PartialCall, *, workload: Workload) -> Cost:
    q, k, v, part, _ = call
    offsets = part.q_offsets.nbytes + part.k_offsets.nbytes
    flops = 4 * part.pairs(workload) * q.shape[1] * q.shape[2]
    sums = q.shape[0] * q.shape[1] * max(4, q.itemsize)
    return Cost(flops, q.nbytes + k.nbytes + v.nbytes + offsets, q.nbytes + sums)


def _meta(call: PartialCall) -> tuple[Tensor, Tensor]:
    q = call.q
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, device="meta"), q.new_empty(q.shape[:2], dtype=wide, device="meta")


@operation(_cost, operands=PartialCall, meta=_meta)
def partial_attention(call: PartialCall) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's queries to the keys that are given of it.

    Returns the softmax's average of v in q's dtype and shape, and the log of the sum of the exponentials of each
    query's scores, [queries, heads] float32 (float64 for float64). The reference holds all scores of a sequence.
    """
    q, k, v, part, scale = call
    out, sums = (torch.empty_like(one, device=q.device) for one in _meta(call))
    for own, others in part.sequences():
        scores = _scores(q[own], k[others], part.causal, scale)
        total = scores.logsumexp(-1, keepdim=True)
        mixed = torch.einsum("hgqk,khd->qhgd", (scores - total).exp(), v[others].to(scores.dtype))
        out[own], sums[own] = mixed.flatten(1, 2).to(q.dtype), total.flatten(0, 1)[..., 0].t()
    return out, sums


Gradients = tuple[Tensor, Tensor, Tensor]


def _gradients_cost(call: PartialGradientsCall, *, workload: Workload) -> Cost:
    *vectors, part, _ = call
    q, k, v = call.q, call.k, call.v
    # Scores and four more products.
    flops = 10 * part.pairs(workload) * q.shape[1] * q.shape[2]
    read = sum(one.nbytes for one in (*vectors, part.q_offsets, part.k_offsets))
    return Cost(flops, read, q.nbytes + k.nbytes + v.nbytes)


def _gradients_meta(call: PartialGradientsCall) -> Gradients:
    of_q, of_k, of_v = (one.new_empty(one.shape, device="meta") for one in (call.q, call.k, call.v))
    return of_q, of_k, of_v


@operation(_gradients_cost, operands=PartialGradientsCall, meta=_gradients_meta)
def partial_attention_gradients(call: PartialGradientsCall) -> Gradients:
    """What the keys of a call of `partial_attention` add to the gradients of q, k and v, in their dtypes."""
    slope, q, k, v, out, sums, part, scale = call
    of_q, of_k, of_v = (torch.empty_like(one) for one in (q, k, v))
    for own, others in part.sequences():
        scores = _scores(q[own], k[others], part.causal, scale)
        wide, kv_heads = scores.dtype, k.shape[1]
        upstream, result, queries = (_grouped(one[own], kv_heads).to(wide) for one in (slope, out, q))
        weights = (scores - _grouped(sums[own], kv_heads).permute(1, 2, 0)[..., None]).exp_()
        # What the softmax takes off the gradient of each score of a query.
        common = (upstream * result).sum(-1).permute(1, 2, 0)[..., None]
        of_scores = weights * (torch.einsum("qhgd,khd->hgqk", upstream, v[others].to(wide)) - common) * scale
        of_q[own] = torch.einsum("hgqk,khd->qhgd", of_scores, k[others].to(wide)).flatten(1, 2).to(q.dtype)
        of_k[others] = torch.einsum("hgqk,qhgd->khd", of_scores, queries).to(k.dtype)
        of_v[others] = torch.einsum("hgqk,qhgd->khd", weights, upstream).to(v.dtype)
    return of_q, of_k, of_v


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[kv_heads, group, queries, keys] in float32 or wider, -inf where a key is hidden."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = torch.einsum("qhgd,khd->hgqk", _grouped(q, k.shape[1]).to(wide), k.to(wide)) * scale
    if causal:
        scores = scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -torch.inf)
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, ...] -> [tokens, kv_heads, group, ...]."""
    grouped: Tensor = x.unflatten(1, (kv_heads, -1))
    return grouped


def _fits(call: PartialCall | PartialGradientsCall) -> bool:
    q = call.q
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return narrow and q.shape[2] % 8 == 0 and q.shape[2] <= 256 and all_plain(q, call.k, call.v)


def _fits_dense(call: PartialCall | PartialGradientsCall) -> bool:
    """Whether all sequences have as many queries, and as many keys: so many rows cannot be divided otherwise.

    Only lengths that recur, and no deterministic run, as `strata.kernels.attention.train` says.
    """
    q, k, part = call.q, call.k, call.part
    sequences = part.q_offsets.shape[0] - 1
    return (
        _fits(call)
        and q.shape[2] <= 128
        and sequences * part.max_queries == q.shape[0] > 0
        and sequences * part.max_keys == k.shape[0] > 0
        and part.max_queries % DENSE_MULTIPLE == part.max_keys % DENSE_MULTIPLE == 0
        and not torch.are_deterministic_algorithms_enabled()
    )


@partial_attention.implement("cudnn", "cuda", supports=_fits_dense)
def _cudnn(call: PartialCall) -> tuple[Tensor, Tensor]:
    *vectors, part, scale = call
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_batched(part, *vectors), None, True, 0.0, part.causal, False, scale=scale
    )
    out, sums = _packed(out, sums)
    return out, sums[..., 0]


@partial_attention_gradients.implement("cudnn", "cuda", supports=_fits_dense)
def _cudnn_gradients(call: PartialGradientsCall) -> Gradients:
    slope, q, k, v, out, sums, part, scale = call
    *vectors, totals = _batched(part, slope, q, k, v, out, sums[..., None])
    # Nothing is dropped out, so no generator's state is read; no bias, and no offsets of sequences of other lengths.
    state, absent = torch.empty((), dtype=torch.int64, device=q.device), (None, None, None)
    lengths = part.max_queries, part.max_keys
    of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *vectors, totals.contiguous(), state, state, *absent, *lengths, 0.0, part.causal, scale=scale
    )
    of_q, of_k, of_v = _packed(of_q, of_k, of_v)
    return of_q, of_k, of_v


def _batched(part: VisibleKeys, *tensors: Tensor) -> list[Tensor]:
    """[rows, heads, width] -> [sequences, heads, length, width]."""
    return [one.unflatten(0, (part.q_offsets.shape[0] - 1, -1)).transpose(1, 2) for one in tensors]


def _packed(*tensors: Tensor) -> list[Tensor]:
    """[sequences, heads, length, width] -> [rows, heads, width]."""
    return [one.transpose(1, 2).flatten(0, 1) for one in tensors]


@partial_attention.implement("flash", "cuda", supports=_fits)
def _flash(call: PartialCall) -> tuple[Tensor, Tensor]:
    q, k, v, part, scale = call
    out, sums, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_said_to_library(part), False, scale=scale)
    return out, sums.t()


@partial_attention_gradients.implement("flash", "cuda", supports=_fits)
def _flash_gradients(call: PartialGradientsCall) -> Gradients:
    slope, q, k, v, out, sums, part, scale = call
    # Nothing is dropped out, so no generator's state is read.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    given = slope, q, k, v, out, sums.t().contiguous(), *_said_to_library(part), state, unused
    of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(*given, scale=scale)
    return of_q, of_k, of_v


def _said_to_library(part: VisibleKeys) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """Its arguments from the offsets on, with no dropout."""
    return part.q_offsets, part.k_offsets, part.max_queries, part.max_keys, 0.0, part.causal
