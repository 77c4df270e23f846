"""Latent attention to the rows that a rank keeps, on CUDA: its kernels also tell the sums of exponentials."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.latent.forms import Dims, KeptLatentCall
from strata.kernels.latent.kernels_triton import latent_decode_kernel, latent_join_kernel, latent_prompt_kernel


def supports(call: KeptLatentCall) -> bool:
    """Registers hold 512 columns of a tile's results."""
    q, row, batch, spec, _, rank = call
    pages = batch.pages
    return (
        pages is not None
        and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and pages.keys[spec.layer].dtype == q.dtype
        and pages.keys[spec.layer].is_contiguous()
        and rank <= 512
        and row.shape[1] - rank <= 64
        and q.stride(-1) == 1
    )


def kernels(call: KeptLatentCall) -> tuple[Any, ...]:
    q, pages = call.q, call.pages
    decode = (latent_decode_kernel, latent_join_kernel)
    if latent_cuda.all_decode(q, call.batch):
        return decode
    parts = latent_cuda.parts_of(q, pages)
    some = parts is not None and latent_cuda.may_decode(pages, parts) > 0
    return (*(decode * some), latent_prompt_kernel)


def scratch(call: KeptLatentCall) -> int:
    """What the splits of decodes wait in."""
    q, pages = call.q, call.pages
    parts = latent_cuda.parts_of(q, pages)
    decodes = q.shape[0] if latent_cuda.all_decode(q, call.batch) else 0
    if not decodes and parts is not None:
        decodes = latent_cuda.may_decode(pages, parts)
    most = pages.tables.shape[1] * pages.page_size
    return latent_cuda.scratch_bytes(decodes, most, q.shape[1], call.rank, q.dtype) if decodes else 0


def attend(call: KeptLatentCall) -> tuple[Tensor, Tensor]:
    """Decodes, which are the first sequences of a batch, have their rows divided; a tile has queries of the others."""
    q, row, batch, spec, kept, rank = call
    pages = call.pages
    heads = q.shape[1]
    # What has a position stands behind the rest of a query.
    dims = Dims(heads, rank, row.shape[1] - rank, rank, rank)
    mixed = torch.empty((q.shape[0], heads, rank), dtype=torch.float32, device=q.device)
    sums = torch.empty((q.shape[0], heads), dtype=torch.float32, device=q.device)
    given = mixed, q, q, pages
    parts = latent_cuda.parts_of(q, pages)
    if latent_cuda.all_decode(q, batch):
        latent_cuda.decode(*given, pages.lengths, spec, dims, sums, kept)
        return mixed, sums
    starts, bounds = batch.offsets, None
    if parts is not None:
        lengths = parts.decode_lengths[: latent_cuda.may_decode(pages, parts)]
        latent_cuda.decode(*given, lengths, spec, dims, sums, kept)
        starts, bounds = parts.starts, parts.bounds
    latent_cuda.prompts(mixed, q, q, batch, pages, spec, dims, starts, bounds, sums, kept)
    return mixed, sums
