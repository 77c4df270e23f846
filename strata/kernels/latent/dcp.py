"""Latent attention in three steps, where ranks divide the rows of each sequence: between them queries and what they
find travel, in the space of the latent, in which all heads read the same rows (see `kernels.attention.dcp`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.dcp import dcp
from strata.kernels.attention.dcp.dcp import dcp_attention, pairs_and_keys
from strata.kernels.attention.dcp.gathered import over_gathered
from strata.kernels.attention.spec import DcpCall, Sequences
from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.latent.attention import latent_attention
from strata.kernels.latent.forms import DcpLatentCall
from strata.kernels.op import ATEN, CUBLAS, operation


def _parts(weight: Tensor, heads: int, value: int) -> tuple[Tensor, Tensor]:
    """What makes keys [heads, nope, rank] and values [heads, value, rank] of a latent."""
    keys, values = weight.unflatten(0, (heads, -1)).tensor_split((-value,), 1)
    return keys, values


def _product_cost(tokens: int, weight: Tensor, share: float, given: int, made: int) -> Cost:
    used = round(weight.nbytes * share)
    return Cost(2 * tokens * round(weight.numel() * share), given + used, made, weights=used)


def _absorb_cost(q: Tensor, weight: Tensor, value: int, *, workload: Workload) -> Cost:
    made = _absorb_meta(q, weight, value)
    share = 1 - q.shape[1] * value / weight.shape[0]
    return _product_cost(q.shape[0], weight, share, q.nbytes, made.nbytes)


def _absorb_meta(q: Tensor, weight: Tensor, value: int) -> Tensor:
    tokens, heads, dim = q.shape
    nope = weight.shape[0] // heads - value
    return q.new_empty((tokens, heads, weight.shape[1] + dim - nope), device="meta")


@operation(_absorb_cost, meta=_absorb_meta, rowwise=True)
def absorb_queries(q: Tensor, weight: Tensor, value: int) -> Tensor:
    """Queries as rows of latents are multiplied by them: [tokens, heads, nope + rope] to [tokens, heads, rank + rope].

    weight: as for `latent_attention`, [heads * (nope + value), rank].
    """
    keys, _ = _parts(weight, q.shape[1], value)
    front, back = q.split_with_sizes((keys.shape[1], q.shape[2] - keys.shape[1]), -1)
    return torch.cat((torch.bmm(front.transpose(0, 1), keys).transpose(0, 1), back), -1)


def _expand_cost(mixed: Tensor, weight: Tensor, value: int, *, workload: Workload) -> Cost:
    made = _expand_meta(mixed, weight, value)
    share = mixed.shape[1] * value / weight.shape[0]
    return _product_cost(mixed.shape[0], weight, share, mixed.nbytes, made.nbytes)


def _expand_meta(mixed: Tensor, weight: Tensor, value: int) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], value), device="meta")


@operation(_expand_cost, meta=_expand_meta, rowwise=True)
def expand_values(mixed: Tensor, weight: Tensor, value: int) -> Tensor:
    """Averages of latents as averages of each head's values: [tokens, heads, rank] to [tokens, heads, value]. weight:
    as for `absorb_queries`."""
    _, values = _parts(weight, mixed.shape[1], value)
    return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


for _product in (absorb_queries, expand_values):
    _product.by_definition("cpu")
absorb_queries.by_definition("cuda", kernels=(CUBLAS, ATEN))
expand_values.by_definition("cuda", kernels=(CUBLAS,))


def _as_keys(call: DcpLatentCall) -> DcpCall:
    """Of `dcp_attention`, by the keys and values that rows are."""
    batch, rows = call.batch, call.row[:, None]
    both = Sequences(batch.offsets, batch.longest, replace(call.pages, values=call.pages.keys))
    return DcpCall(call.q, rows, rows, both, call.spec, call.kept)


def _cost(call: DcpLatentCall, *, workload: Workload) -> Cost:
    q, row, _, spec, dcp, rank = call
    pairs, rows = pairs_and_keys(workload, dcp)
    cached = rows * row.shape[1] * call.pages.keys[spec.layer].element_size()
    heads = q.shape[1]
    written = workload.tokens * heads * (rank + 1) * max(4, q.element_size())
    return Cost(2 * heads * (q.shape[2] + rank) * pairs, q.nbytes + cached, written, cached=cached)


def _meta(call: DcpLatentCall) -> tuple[Tensor, Tensor]:
    q = call.q
    wide = torch.promote_types(q.dtype, torch.float32)
    mixed = q.new_empty((*q.shape[:2], call.rank), dtype=wide, device="meta")
    return mixed, q.new_empty(q.shape[:2], dtype=wide, device="meta")


@operation(_cost, operands=DcpLatentCall, meta=_meta, reads_state=True)
def dcp_latent_attention(call: DcpLatentCall) -> tuple[Tensor, Tensor]:
    """`dcp_attention` where a row is the key and, its first `rank` columns, the value of all heads.

    Returns [tokens, heads, rank] and [tokens, heads].
    """
    mixed, sums = dcp_attention.reference(*_as_keys(call))
    return mixed[..., : call.rank], sums


def _cpu_supports(call: DcpLatentCall) -> bool:
    return call.batch.pages is not None and dcp.supports_on_cpu(_as_keys(call))


def _on_cpu(call: DcpLatentCall) -> tuple[Tensor, Tensor]:
    mixed, sums = dcp.attend_on_cpu(_as_keys(call))
    return mixed[..., : call.rank], sums


dcp_latent_attention.implement("by sequence", "cpu", supports=_cpu_supports)(_on_cpu)
dcp_latent_attention.in_triton(
    latent_cuda.attend_dcp,
    supports=latent_cuda.dcp_supports,
    kernels=latent_cuda.dcp_kernels,
    scratch=latent_cuda.dcp_scratch,
)
gathered_latent_attention = over_gathered(latent_attention)
