"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made from one row a token.

Whether rows are expanded to keys and values of each head or queries are brought into the space of the rows is for the
implementation to choose, sequence by sequence: one step has decodes, for which the one is 9 to 70 times fewer bytes,
beside prompts, for which the other is a third of the FLOPs. So both are one node of the graph, and the weight that both
need lies in memory once. Memory traffic counts the rows, which all heads share, once.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.latent import cpu as latent_cpu
from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.latent import expanded_cuda
from strata.kernels.latent.forms import LatentCall, alike, expanded
from strata.kernels.op import CUBLAS, operation

# Of the implementations for CUDA, by which a benchmark finds them.
ABSORBED, PROMPTS_EXPANDED = "triton", "triton, prompts expanded"


def _cost(call: LatentCall, *, workload: Workload) -> Cost:
    """Of each sequence the FLOPs of the form that has fewer (`Dims`); every row that is seen is read once."""
    q, row, weight, batch, spec = call
    dims = call.dims
    flops = seen = 0
    for new, total in zip(workload.new, workload.total, strict=True):
        flops += min(dims.absorbed_flops(new, total), dims.expanded_flops(new, total)) if new else 0
        seen += total if new else 0
    pool = row if batch.pages is None else batch.pages.keys[spec.layer]
    cached = seen * row.shape[1] * pool.element_size()
    written = workload.tokens * dims.heads * dims.value * q.element_size()
    return Cost(flops, q.nbytes + cached + weight.nbytes, written, weights=weight.nbytes, cached=cached)


def _meta(call: LatentCall) -> Tensor:
    return call.q.new_empty((call.q.shape[0], call.dims.heads, call.dims.value), device="meta")


@operation(_cost, operands=LatentCall, meta=_meta, reads_state=True, attends=True)
def latent_attention(call: LatentCall) -> Tensor:
    """Each query over the rows of its own sequence at its own position and before.

    Returns [tokens, heads, value] in q's dtype; all of it is computed in float32 (float64 for float64 input). Rows of a
    sequence with length 0 are unspecified.
    """
    q, row, weight, batch, spec = call
    dims, pages = call.dims, batch.pages
    lengths = None if pages is None else pages.lengths.tolist()
    precision = torch.promote_types(q.dtype, torch.float32)
    parts = []
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        total = last - first if lengths is None else lengths[sequence]
        if total < last - first:
            parts.append(q.new_zeros((last - first, dims.heads, dims.value)))
            continue
        rows = row[first:last]
        if pages is not None:
            used = pages.tables[sequence, : -(-total // pages.page_size)].long()
            rows = pages.keys[spec.layer][used].flatten(0, 2)[:total]
        key, value = expanded(rows.to(precision), weight.to(precision), dims)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].to(precision), key) * spec.scale
        at = torch.arange(total - (last - first), total, device=q.device)[:, None]
        hidden = torch.arange(total, device=q.device) > at
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype))
    return torch.cat(parts) if parts else q.new_empty((0, dims.heads, dims.value))


def _packed(call: LatentCall) -> bool:
    return call.batch.pages is None


def _expanded(call: LatentCall) -> Tensor:
    """Sequences that stand whole in the batch: keys and values of each head, and `attention` of these."""
    dims = call.dims
    mixed: Tensor = attention(*alike(call.q, *expanded(call.row, call.weight, dims)), call.batch, call.spec)
    return mixed[..., : dims.value]


latent_attention.implement("by sequence", "cpu", supports=latent_cpu.supports)(latent_cpu.paged)
latent_attention.implement("expanded", "cpu", differentiable=True, supports=_packed)(_expanded)
latent_attention.implement("batch-invariant tiles", "cpu", invariant=True)(latent_cpu.batch_invariant_tiles)
latent_attention.in_triton(
    expanded_cuda.attend,
    PROMPTS_EXPANDED,
    supports=expanded_cuda.supports,
    kernels=expanded_cuda.kernels,
    scratch=expanded_cuda.scratch,
)
latent_attention.in_triton(
    latent_cuda.attend,
    ABSORBED,
    supports=latent_cuda.supports,
    kernels=latent_cuda.kernels,
    scratch=latent_cuda.scratch,
)
latent_attention.in_triton(
    latent_cuda.attend_batch_invariant,
    "triton fixed",
    invariant=True,
    supports=latent_cuda.supports,
    kernels=latent_cuda.FIXED_KERNELS,
)
latent_attention.implement("expanded", "cuda", differentiable=True, supports=_packed, kernels=(CUBLAS,))(_expanded)
