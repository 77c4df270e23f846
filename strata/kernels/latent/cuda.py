"""Latent attention over pages on CUDA with absorbed queries: grids follow from shapes alone, so that a step can
be recorded in a CUDA graph, and which sequences are prompts only the device knows there."""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.latent.forms import Dims, LatentCall, by_head
from strata.kernels.latent.head_product import head_product, head_product_kernel
from strata.kernels.latent.kernels_triton import latent_decode_kernel, latent_join_kernel, latent_prompt_kernel
from strata.kernels.latent.tiles import Tile, constants, decode_tile, prompt_tile
from strata.kernels.op import CUBLAS
from strata.kernels.state.kept_keys import ALL_KEYS, KeptKeys
from strata.kernels.state.paged import PagedKV

FIXED_KERNELS = (head_product_kernel, latent_prompt_kernel, head_product_kernel)


def supports(call: LatentCall) -> bool:
    """Registers hold 512 columns of a tile's results."""
    q, row, weight, batch, spec = call
    pages = batch.pages
    return (
        pages is not None
        and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and pages.keys[spec.layer].dtype == q.dtype
        and pages.keys[spec.layer].is_contiguous()
        and weight.shape[1] <= 512
        and row.shape[1] - weight.shape[1] <= 64
        and q.stride(-1) == 1
        and weight.is_contiguous()
    )


def kernels(call: LatentCall) -> tuple[Any, ...]:
    q, pages = call.q, call.pages
    decode = (latent_decode_kernel, latent_join_kernel)
    if all_decode(q, call.batch):
        return (CUBLAS, *decode, CUBLAS)
    parts = parts_of(q, pages)
    some = parts is not None and may_decode(pages, parts) > 0
    return (CUBLAS, *(decode * some), latent_prompt_kernel, CUBLAS)


def scratch_bytes(sequences: int, most: int, heads: int, rank: int, dtype: torch.dtype) -> int:
    """What the splits of decoding sequences wait in, where a sequence may have so many rows."""
    return 4 * sequences * decode_tile(heads, rank, dtype, sequences, most).splits * heads * (rank + 1)


def scratch(call: LatentCall) -> int:
    """Queries and what they find in the space of the latents, and what the splits of decodes wait in."""
    q, batch, dims, pages = call.q, call.batch, call.dims, call.pages
    parts = parts_of(q, pages)
    decodes = q.shape[0] if all_decode(q, batch) else 0 if parts is None else may_decode(pages, parts)
    both = 2 * q.shape[0] * dims.heads * dims.rank * q.element_size()
    result = q.shape[0] * dims.heads * dims.value * q.element_size()
    most = pages.tables.shape[1] * pages.page_size
    splits = scratch_bytes(decodes, most, dims.heads, dims.rank, q.dtype) if decodes else 0
    return both + max(0, splits - result)


def attend(call: LatentCall) -> Tensor:
    """Decodes, which are the first sequences of a batch, have their rows divided; a tile has queries of the others."""
    q, _, weight, batch, spec = call
    dims, pages = call.dims, call.pages
    keys, values = by_head(weight, dims)
    latent = torch.bmm(q[..., : dims.nope].transpose(0, 1), keys).transpose(0, 1)
    out = torch.empty_strided(latent.shape, latent.stride(), dtype=q.dtype, device=q.device)
    parts = parts_of(q, pages)
    if all_decode(q, batch):
        decode(out, latent, q, pages, pages.lengths, spec, dims)
    elif parts is None:
        prompts(out, latent, q, batch, pages, spec, dims, batch.offsets, None)
    else:
        decode(out, latent, q, pages, parts.decode_lengths[: may_decode(pages, parts)], spec, dims)
        prompts(out, latent, q, batch, pages, spec, dims, parts.starts, parts.bounds)
    return torch.bmm(out.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def attend_fixed(call: LatentCall) -> Tensor:
    """All sequences as prompts are: a decode has the bits that it would have at the end of one."""
    q, _, weight, batch, spec = call
    dims, pages = call.dims, call.pages
    keys, values = by_head(weight, dims)
    latent = head_product(q[..., : dims.nope], keys.transpose(1, 2))
    out = torch.empty_like(latent)
    prompts(out, latent, q, batch, pages, spec, dims, batch.offsets, None)
    return head_product(out, values)


def all_decode(q: Tensor, batch: PackedBatch) -> bool:
    return batch.longest == 1 and batch.pages is not None and q.shape[0] == batch.pages.tables.shape[0]


def parts_of(q: Tensor, pages: PagedKV) -> BatchParts | None:
    """Which of the sequences decode, if each of them has a token."""
    return pages.parts if pages.tables.shape[0] <= q.shape[0] else None


def may_decode(pages: PagedKV, parts: BatchParts) -> int:
    """How many sequences, the first of the batch, get the programs of a decode; those of prompts find no rows."""
    return pages.tables.shape[0] if parts.decodes is None else parts.decodes


def decode(
    out: Tensor,
    latent: Tensor,
    q: Tensor,
    pages: PagedKV,
    lengths: Tensor,
    spec: AttentionSpec,
    dims: Dims,
    sums: Tensor | None = None,
    kept: KeptKeys = ALL_KEYS,
    tile: Tile | None = None,
) -> None:
    """Of the first sequences, of which each decodes or has length 0, the weighted sums of latents, into out [tokens,
    heads, rank]; latent, of any strides in the first `rank` columns, and q, behind `nope` columns: queries.

    sums: [tokens, heads] float32, takes the logarithms of the sums of exponentials. kept: which rows the pages hold.
    tile: None: the rule's.
    """
    sequences, tables = lengths.shape[0], pages.tables
    if sequences == 0:
        return
    tile = tile or decode_tile(dims.heads, dims.rank, q.dtype, sequences, tables.shape[1] * pages.page_size)
    results = torch.empty((sequences, tile.splits, dims.heads, dims.rank), dtype=torch.float32, device=q.device)
    scales = torch.empty((sequences, tile.splits, dims.heads), dtype=torch.float32, device=q.device)
    latent_decode_kernel[(-(-dims.heads // tile.heads), sequences, tile.splits)](
        latent,
        q,
        pages.keys[spec.layer],
        results,
        scales,
        lengths,
        tables,
        spec.scale * log2(e),
        dims.nope,
        latent.stride(0),
        latent.stride(1),
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        tile.split,
        kept.rank,
        KEY_RANKS=kept.ranks,
        **constants(dims.heads, dims.rank, dims.rope, pages.page_size, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    padded = constants(dims.heads, dims.rank, dims.rope, pages.page_size, tile)["RANK_PAD"]
    latent_join_kernel[(dims.heads, sequences)](
        results,
        scales,
        out,
        lengths,
        tile.splits,
        tile.split,
        out.stride(0),
        out.stride(1),
        sums,
        kept.rank,
        KEY_RANKS=kept.ranks,
        HEADS=dims.heads,
        RANK=dims.rank,
        RANK_PAD=padded,
        BLOCK_N=tile.rows,
        num_warps=4,
    )


def prompts(
    out: Tensor,
    latent: Tensor,
    q: Tensor,
    batch: PackedBatch,
    pages: PagedKV,
    spec: AttentionSpec,
    dims: Dims,
    starts: Tensor,
    bounds: Tensor | None,
    sums: Tensor | None = None,
    kept: KeptKeys = ALL_KEYS,
    *,
    continued: bool = False,
) -> None:
    """As `decode`, of sequences with any number of queries. starts: from which row of the batch on each sequence's are
    run. bounds: which sequences have such rows; None: any may. continued: only those with tokens in front of these are
    run, and the rows of the others stay as they are."""
    tokens, sequences = q.shape[0], batch.offsets.shape[0] - 1
    if tokens == 0:
        return
    tile = prompt_tile(dims.heads, dims.rank, q.dtype)
    tiles = tokens // (tile.queries // tile.heads) + sequences
    latent_prompt_kernel[(-(-dims.heads // tile.heads) * tiles,)](
        latent,
        q,
        pages.keys[spec.layer],
        out,
        starts,
        batch.offsets,
        bounds,
        pages.lengths,
        pages.tables,
        sequences,
        spec.scale * log2(e),
        dims.nope,
        latent.stride(0),
        latent.stride(1),
        q.stride(0),
        q.stride(1),
        pages.tables.stride(0),
        out.stride(0),
        out.stride(1),
        sums,
        kept.rank,
        KEY_RANKS=kept.ranks,
        CONTINUED=continued,
        BLOCK_M=tile.queries,
        **constants(dims.heads, dims.rank, dims.rope, pages.page_size, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
