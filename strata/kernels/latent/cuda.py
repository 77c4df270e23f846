"""Latent attention over pages on CUDA with absorbed queries: grids follow from shapes alone, so that a step can
be captured in a CUDA graph, and which sequences are prompts only the device knows there.

`LatentTile`: how the kernels divide their work. Decodes of up to 16 heads were measured on an H200
(`python -m benchmarks.latent.decodes --tiles`), all else was chosen by what registers and shared memory of a Hopper
hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.attention.spec import AttentionBatch, AttentionSpec, pages_of
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.latent.forms import DcpLatentCall, Dims, LatentCall, by_head
from strata.kernels.latent.kernels_triton import (
    head_product,
    head_product_kernel,
    latent_decode_kernel,
    latent_join_kernel,
    latent_prompt_kernel,
)
from strata.kernels.op import CUBLAS
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.kernels.state.paged import PagedKV

_PROCESSORS = 132
# A program needs much of a multiprocessor's memory, so more than two for each find no place.
_PROGRAMS = 2 * _PROCESSORS
_MAX_SPLITS = 64
# Even where there are many sequences, one may be much longer than the others.
_MIN_SPLITS = 4
_SPLIT_ROWS = 256


@dataclass(frozen=True)
class LatentTile:
    """heads: of a program; queries: rows of its tile, heads times tokens. rows: of a block of latents; warps, stages:
    of a program and of its pipeline. split: the fewest rows that are worth a program. splits: the most of a sequence.
    """

    heads: int
    queries: int
    rows: int
    warps: int
    stages: int
    split: int = 0
    splits: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def prompt_tile(heads: int, rank: int, dtype: torch.dtype) -> LatentTile:
    """The same for any batch: the bits of a result depend on it."""
    if dtype == torch.float32:
        return LatentTile(min(16, next_power_of_2(heads)), 16, 16, 8, 1)
    return LatentTile(min(64, next_power_of_2(heads)), 64, 32, 8, 2)


def decode_tile(heads: int, rank: int, dtype: torch.dtype, sequences: int, most: int) -> LatentTile:
    """For so many sequences of at most `most` rows. A matrix instruction has 16 rows at least."""
    together = max(16, min(64, next_power_of_2(heads)))
    if dtype == torch.float32:
        together = 16
    programs = max(1, sequences) * ceil_div(heads, together)
    wanted = max(_MIN_SPLITS, _PROGRAMS // programs)
    splits = max(1, min(_MAX_SPLITS, wanted, ceil_div(most, _SPLIT_ROWS)))
    if dtype == torch.float32:
        return LatentTile(together, together, 16, 8, 1, _SPLIT_ROWS, splits)
    if together > 16:
        return LatentTile(together, together, 32, 8, 2, _SPLIT_ROWS, splits)
    # With three stages a program has a multiprocessor for itself, with two it has another beside it.
    return LatentTile(together, together, 64, 4, 3 if programs * splits <= _PROCESSORS else 2, _SPLIT_ROWS, splits)


def constants(dims: Dims, page_size: int, tile: LatentTile) -> dict[str, int]:
    """What the kernels of prompts and of decodes have in common."""
    return {
        "HEADS": dims.heads,
        "RANK": dims.rank,
        "RANK_PAD": max(16, next_power_of_2(dims.rank)),
        "ROPE": dims.rope,
        "ROPE_PAD": max(16, next_power_of_2(dims.rope)),
        "PAGE_SIZE": page_size,
        "BLOCK_HEADS": tile.heads,
        "BLOCK_N": tile.rows,
    }


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
    def of(q: Tensor, batch: AttentionBatch) -> LatentStep:
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


def reads_rows(q: Tensor, row: Tensor, rank: int, batch: AttentionBatch, spec: AttentionSpec) -> bool:
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
    mixed, values = in_latents(call.q, call, LatentStep.of(call.q, call.batch))
    return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def in_latents(q: Tensor, call: LatentCall, split: LatentStep, *, continued: bool = False) -> tuple[Tensor, Tensor]:
    """What the first queries of a call find in the space of the latents, by `absorbed`, and what makes values of it."""
    keys, values = by_head(call.weight, call.dims)
    latent = torch.bmm(q[..., : call.dims.nope].transpose(0, 1), keys).transpose(0, 1)
    mixed = torch.empty_strided(latent.shape, latent.stride(), dtype=q.dtype, device=q.device)
    absorbed(mixed, latent, q, call.batch, call.spec, call.dims, split, continued=continued)
    return mixed, values


def attend_batch_invariant(call: LatentCall) -> Tensor:
    """All sequences as prompts are: a decode has the bits that it would have at the end of one."""
    q, _, weight, batch, spec = call
    dims, pages = call.dims, call.pages
    keys, values = by_head(weight, dims)
    latent = head_product(q[..., : dims.nope], keys.transpose(1, 2))
    out = torch.empty_like(latent)
    prompts(out, latent, q, batch, pages, spec, dims, batch.offsets, None)
    return head_product(out, values)


def dcp_supports(call: DcpLatentCall) -> bool:
    return reads_rows(call.q, call.row, call.rank, call.batch, call.spec)


def dcp_kernels(call: DcpLatentCall) -> tuple[Any, ...]:
    return LatentStep.of(call.q, call.batch).kernels()


def dcp_scratch(call: DcpLatentCall) -> int:
    """What the splits of decodes wait in."""
    return splits_bytes(LatentStep.of(call.q, call.batch).decodes, call.q, call.pages, call.rank)


def attend_dcp(call: DcpLatentCall) -> tuple[Tensor, Tensor]:
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
    batch: AttentionBatch,
    spec: AttentionSpec,
    dims: Dims,
    split: LatentStep,
    sums: Tensor | None = None,
    kept: DcpShard = ALL_KEYS,
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
    kept: DcpShard = ALL_KEYS,
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
    batch: AttentionBatch,
    pages: PagedKV,
    spec: AttentionSpec,
    dims: Dims,
    starts: Tensor,
    bounds: Tensor | None,
    sums: Tensor | None = None,
    kept: DcpShard = ALL_KEYS,
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
