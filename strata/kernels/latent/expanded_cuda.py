"""Latent attention over pages on CUDA in steps with prompts: those that begin in the step, which stand whole in it,
attend to keys and values of each head, made by one product of the step's rows.

The others, decodes and prompts with tokens from before, are absorbed. In a recorded step only the device knows which
are which, so both forms are launched for any batch of its size: the kernel of each leaves the other's sequences as they
are.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.latent.cuda import all_decode, decode, may_decode, parts_of, prompts
from strata.kernels.latent.expanded_triton import (
    ExpandedTile,
    expanded_constants,
    expanded_prompt_kernel,
    expanded_tile,
)
from strata.kernels.latent.forms import Dims, LatentCall, by_head
from strata.kernels.latent.kernels_triton import latent_decode_kernel, latent_join_kernel, latent_prompt_kernel
from strata.kernels.op import CUBLAS
from strata.kernels.state.paged import PagedKV


def supports(call: LatentCall) -> bool:
    """The heads for which the kernel's tiles were chosen, DeepSeek's."""
    q, row, dims = call.q, call.row, call.dims
    return (
        latent_cuda.supports(call)
        and not all_decode(q, call.batch)
        and (dims.nope, dims.rope, dims.value) == (128, 64, 128)
        and q.dtype in (torch.bfloat16, torch.float16)
        and row.stride(-1) == 1
    )


def kernels(call: LatentCall) -> tuple[Any, ...]:
    pages = call.pages
    parts = parts_of(call.q, pages)
    absorbed: tuple[Any, ...] = ()
    if parts is not None and may_decode(pages, parts) > 0:
        absorbed = latent_decode_kernel, latent_join_kernel
    if not _begin(parts):
        absorbed += (latent_prompt_kernel,)
    return (*((CUBLAS, *absorbed, CUBLAS) if absorbed else ()), CUBLAS, expanded_prompt_kernel)


def scratch(call: LatentCall) -> int:
    """One after the other: what absorbed sequences need, and the keys and values of all heads."""
    q, dims, pages = call.q, call.dims, call.pages
    parts = parts_of(q, pages)
    decodes = 0 if parts is None else may_decode(pages, parts)
    absorbed = 2 * (decodes if _begin(parts) else q.shape[0]) * dims.heads * dims.rank * q.element_size()
    if decodes:
        most = pages.tables.shape[1] * pages.page_size
        absorbed += latent_cuda.scratch_bytes(decodes, most, dims.heads, dims.rank, q.dtype)
    return max(absorbed, q.shape[0] * call.weight.shape[0] * q.element_size())


def attend(call: LatentCall) -> Tensor:
    """What is absorbed comes first, and may leave anything in the rows of prompts that begin: these come last."""
    q, row, weight, batch, spec = call
    dims, pages = call.dims, call.pages
    parts = parts_of(q, pages)
    result = torch.empty((q.shape[0], dims.heads, dims.value), dtype=q.dtype, device=q.device)
    _absorbed(result, q, weight, batch, pages, parts, spec, dims)
    made = F.linear(row[:, : dims.rank], weight)
    starts, bounds = (batch.offsets, None) if parts is None else (parts.starts, parts.bounds)
    expanded_prompts(result, q, made, row, batch, pages, spec, dims, starts, bounds)
    return result


def _begin(parts: BatchParts | None) -> bool:
    """Whether the host knows that nothing but decodes is absorbed, and how many there are."""
    return parts is not None and parts.begin and parts.decodes is not None


def _absorbed(
    result: Tensor,
    q: Tensor,
    weight: Tensor,
    batch: PackedBatch,
    pages: PagedKV,
    parts: BatchParts | None,
    spec: AttentionSpec,
    dims: Dims,
) -> None:
    """Decodes and prompts with tokens from before the step, into their rows of result [tokens, heads, value]."""
    decodes = 0 if parts is None else may_decode(pages, parts)
    if _begin(parts):  # a decode has one row
        q, result = q[:decodes], result[:decodes]
    if not len(q):
        return
    keys, values = by_head(weight, dims)
    latent = torch.bmm(q[..., : dims.nope].transpose(0, 1), keys).transpose(0, 1)
    mixed = torch.empty_strided(latent.shape, latent.stride(), dtype=q.dtype, device=q.device)
    if parts is not None:
        decode(mixed, latent, q, pages, parts.decode_lengths[:decodes], spec, dims)
    if not _begin(parts):
        starts, bounds = (batch.offsets, None) if parts is None else (parts.starts, parts.bounds)
        prompts(mixed, latent, q, batch, pages, spec, dims, starts, bounds, continued=True)
    torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2), out=result.transpose(0, 1))


def expanded_prompts(
    out: Tensor,
    q: Tensor,
    made: Tensor,
    row: Tensor,
    batch: PackedBatch,
    pages: PagedKV,
    spec: AttentionSpec,
    dims: Dims,
    starts: Tensor,
    bounds: Tensor | None,
    tile: ExpandedTile | None = None,
) -> None:
    """Of sequences all of whose tokens are in the batch, the results into their rows of out [tokens, heads, value]; of
    those with length 0 zeros. The other rows stay as they are.

    made: [tokens, heads * (nope + value)], keys and values of each head of the batch's rows. starts, bounds: as for
    `latent_cuda.prompts`. tile: None: that of the rule.
    """
    tokens, sequences = q.shape[0], batch.offsets.shape[0] - 1
    if tokens == 0:
        return
    tile = tile or expanded_tile(q.dtype)
    # Before Hopper operands of products take registers too: under a cap hundreds of bytes would spill.
    capped = DeviceLimits.of(q.device).capability >= (9, 0) if tile.registers else False
    expanded_prompt_kernel[(dims.heads, tokens // tile.queries + sequences)](
        q,
        made,
        row,
        out,
        starts,
        batch.offsets,
        bounds,
        pages.lengths,
        sequences,
        spec.scale * log2(e),
        dims.rank,
        q.stride(0),
        q.stride(1),
        made.stride(0),
        row.stride(0),
        out.stride(0),
        out.stride(1),
        **expanded_constants(dims, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers if capped else None,
    )
