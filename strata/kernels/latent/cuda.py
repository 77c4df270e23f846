"""Latent attention over pages on CUDA with absorbed queries: grids follow from shapes alone, so that a step can
be recorded in a CUDA graph, and which sequences are prompts only the device knows there."""

from __future__ import annotations

from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.attention.spec import AttentionSpec, PackedBatch, pages_of
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.latent.forms import Dims, KeptLatentCall, LatentCall, by_head
from strata.kernels.latent.head_product import head_product, head_product_kernel
from strata.kernels.latent.kernels_triton import latent_decode_kernel, latent_join_kernel, latent_prompt_kernel
from strata.kernels.latent.tiles import LatentTile, constants, decode_tile, prompt_tile
from strata.kernels.op import CUBLAS
from strata.kernels.state.kept_keys import ALL_KEYS, KeptKeys
from strata.kernels.state.paged import PagedKV

FIXED_KERNELS = (head_product_kernel, latent_prompt_kernel, head_product_kernel)


class LatentStep(NamedTuple):
    """How kernels share the sequences of a step: the first get the programs of a decode, of which those for prompts
    find no rows, and queries of the others are in tiles.

    decodes: how many those are, of `lengths`. starts, bounds: as for `prompts`; starts None: all decode.
    begin: the host knows that the prompts have no tokens from before the step.
    """

    decodes: int
    lengths: Tensor
    starts: Tensor | None
    bounds: Tensor | None = None
    begin: bool = False

    @staticmethod
    def of(q: Tensor, batch: PackedBatch) -> LatentStep:
        pages = pages_of(batch)
        sequences, parts = pages.tables.shape[0], pages.parts
        if batch.longest == 1 and q.shape[0] == sequences:
            return LatentStep(sequences, pages.lengths, None)
        if parts is None or sequences > q.shape[0]:  # one may go without a token
            return LatentStep(0, pages.lengths, batch.offsets)
        count = sequences if parts.decodes is None else parts.decodes
        begin = parts.begin and parts.decodes is not None
        return LatentStep(count, parts.decode_lengths[:count], parts.starts, parts.bounds, begin)

    def kernels(self, prompts: bool = True) -> tuple[Any, ...]:
        """What `absorbed` launches, with prompts or without."""
        decode = (latent_decode_kernel, latent_join_kernel) * (self.decodes > 0)
        return (*decode, latent_prompt_kernel) if self.starts is not None and prompts else decode


def reads_rows(q: Tensor, row: Tensor, rank: int, batch: PackedBatch, spec: AttentionSpec) -> bool:
    """Whether kernels take such queries and pages: registers hold 512 columns of a tile's results."""
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


def supports(call: LatentCall) -> bool:
    q, row, weight, batch, spec = call
    return weight.is_contiguous() and reads_rows(q, row, weight.shape[1], batch, spec)


def kernels(call: LatentCall) -> tuple[Any, ...]:
    return (CUBLAS, *LatentStep.of(call.q, call.batch).kernels(), CUBLAS)


def scratch_bytes(sequences: int, most: int, heads: int, rank: int, dtype: torch.dtype) -> int:
    """What the splits of decoding sequences wait in, where a sequence may have so many rows."""
    return 4 * sequences * decode_tile(heads, rank, dtype, sequences, most).splits * heads * (rank + 1)


def splits_bytes(decodes: int, q: Tensor, pages: PagedKV, rank: int) -> int:
    """The same of the first sequences of a step."""
    most = pages.tables.shape[1] * pages.page_size
    return scratch_bytes(decodes, most, q.shape[1], rank, q.dtype) if decodes else 0


def scratch(call: LatentCall) -> int:
    """Queries and what they find in the space of the latents, and what the splits of decodes wait in."""
    q, dims = call.q, call.dims
    both = 2 * q.shape[0] * dims.heads * dims.rank * q.element_size()
    result = q.shape[0] * dims.heads * dims.value * q.element_size()
    return both + max(0, splits_bytes(LatentStep.of(q, call.batch).decodes, q, call.pages, dims.rank) - result)


def attend(call: LatentCall) -> Tensor:
    """Decodes, which are the first sequences of a batch, have their rows divided; a tile has queries of the others."""
    q, _, weight, batch, spec = call
    keys, values = by_head(weight, call.dims)
    latent = torch.bmm(q[..., : call.dims.nope].transpose(0, 1), keys).transpose(0, 1)
    out = torch.empty_strided(latent.shape, latent.stride(), dtype=q.dtype, device=q.device)
    absorbed(out, latent, q, batch, spec, call.dims, LatentStep.of(q, batch))
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


def dcp_supports(call: KeptLatentCall) -> bool:
    return reads_rows(call.q, call.row, call.rank, call.batch, call.spec)


def dcp_kernels(call: KeptLatentCall) -> tuple[Any, ...]:
    return LatentStep.of(call.q, call.batch).kernels()


def dcp_scratch(call: KeptLatentCall) -> int:
    """What the splits of decodes wait in."""
    return splits_bytes(LatentStep.of(call.q, call.batch).decodes, call.q, call.pages, call.rank)


def attend_dcp(call: KeptLatentCall) -> tuple[Tensor, Tensor]:
    """`attend` to the rows that a rank keeps, with the sums of exponentials."""
    q, row, batch, spec, kept, rank = call
    # What has a position stands behind the rest of a query.
    dims = Dims(q.shape[1], rank, row.shape[1] - rank, rank, rank)
    mixed = torch.empty((*q.shape[:2], rank), dtype=torch.float32, device=q.device)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    absorbed(mixed, q, q, batch, spec, dims, LatentStep.of(q, batch), sums, kept)
    return mixed, sums


def absorbed(
    out: Tensor,
    latent: Tensor,
    q: Tensor,
    batch: PackedBatch,
    spec: AttentionSpec,
    dims: Dims,
    split: LatentStep,
    sums: Tensor | None = None,
    kept: KeptKeys = ALL_KEYS,
    *,
    continued: bool = False,
) -> None:
    """`decode` and `prompts` of a step's sequences, whichever it has."""
    pages = pages_of(batch)
    decode(out, latent, q, pages, split.lengths[: split.decodes], spec, dims, sums, kept)
    if split.starts is not None and not (continued and split.begin):
        where = split.starts, split.bounds
        prompts(out, latent, q, batch, pages, spec, dims, *where, sums, kept, continued=continued)


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
    tile: LatentTile | None = None,
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
    queries = spec.scale * log2(e), dims.nope, *latent.stride()[:2], *q.stride()[:2]
    shape = {**constants(dims, pages.page_size, tile), "KEY_RANKS": kept.ranks}
    grid = ceil_div(dims.heads, tile.heads), sequences, tile.splits
    tensors = latent, q, pages.keys[spec.layer], results, scales, lengths, tables
    latent_decode_kernel[grid](*tensors, *queries, tables.stride(0), tile.split, kept.rank, **shape, **tile.options)
    joined = {name: shape[name] for name in ("KEY_RANKS", "HEADS", "RANK", "RANK_PAD", "BLOCK_N")}
    splits = tile.splits, tile.split, *out.stride()[:2]
    latent_join_kernel[(dims.heads, sequences)](
        results, scales, out, lengths, *splits, sums, kept.rank, **joined, num_warps=4
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
    tensors = latent, q, pages.keys[spec.layer], out, starts, batch.offsets, bounds, pages.lengths, pages.tables
    queries = sequences, spec.scale * log2(e), dims.nope, *latent.stride()[:2], *q.stride()[:2]
    places = pages.tables.stride(0), *out.stride()[:2]
    own = {"KEY_RANKS": kept.ranks, "CONTINUED": continued, "BLOCK_M": tile.queries}
    shape = constants(dims, pages.page_size, tile)
    latent_prompt_kernel[(ceil_div(dims.heads, tile.heads) * tiles,)](
        *tensors, *queries, *places, sums, kept.rank, **own, **shape, **tile.options
    )
