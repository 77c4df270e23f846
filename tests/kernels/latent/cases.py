"""Steps of latent attention: pages in no order, what nobody wrote is not a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strata.comm.join_heads import joined
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.latent.dcp import absorb_queries, expand_values
from strata.kernels.latent.forms import Dims
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV

SPEC = AttentionSpec(0, 0.3)
PAGE_SIZE = 4
Call = tuple[Tensor, Tensor, Tensor, Sequences, AttentionSpec]


def make_call(
    dims: Dims, new: Sequence[int], total: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Call:
    """The arguments of `latent_attention` for sequences of `total` tokens, the last `new` of which are this step's."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = some(dims.heads * (dims.nope + dims.value), dims.rank) / dims.rank**0.5
    q = some(sum(new), dims.heads, dims.nope + dims.rope)
    most = max(-(-length // PAGE_SIZE) for length in total)
    pages = torch.randperm(most * len(total), generator=generator)
    tables = pages.to(torch.int32).view(len(total), most)
    pool = torch.full((most * len(total), PAGE_SIZE, 1, dims.rank + dims.rope), float("nan"), dtype=dtype)
    rows, slots = [], []
    for table, own, length in zip(tables.tolist(), new, total, strict=True):
        places = torch.tensor([table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(length)])
        written = some(length, dims.rank + dims.rope)
        pool.flatten(0, 1)[places, 0] = written
        rows.append(written[length - own :])
        slots.append(places[length - own :])
    offsets = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(total, dtype=torch.int32)
    kept = PagedKV((pool,), (pool,), tables, lengths, torch.cat(slots).to(torch.int32))
    return q, torch.cat(rows), weight, Sequences(offsets, max(new), kept), SPEC


def with_parts(call: Call, decodes: int, *, captured: bool) -> Call:
    """The same step, of which the first sequences are known to decode, or only the device knows it."""
    q, row, weight, batch, spec = call
    assert batch.pages is not None
    lengths, starts = batch.pages.lengths.clone(), batch.offsets[:-1].clone()
    lengths[decodes:] = 0
    starts[:decodes] = batch.offsets[1 : decodes + 1]
    bounds = torch.tensor([decodes, len(lengths)], dtype=torch.int32)
    begin = not captured and bool((batch.pages.lengths == batch.offsets.diff())[decodes:].all())
    parts = BatchSplit(lengths, starts, bounds, None if captured else decodes, begin=begin)
    return q, row, weight, batch._replace(pages=replace(batch.pages, parts=parts)), spec


def by_ranks(call: Call, ranks: int, attend: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """What `latent_attention` finds, by ranks of which each attends as `dcp_latent_attention` to the rows it keeps."""
    q, row, weight, batch, spec = call
    dims = Dims.of(q, row, weight)
    queries = absorb_queries(q, weight, dims.value)
    found = []
    for rank in range(ranks):
        kept = DcpShard(ranks, rank)
        found.append(attend(queries, row, _kept(batch, kept), spec, kept, dims.rank))
    mixed, sums = (torch.stack(parts) for parts in zip(*found, strict=True))
    return expand_values(joined(mixed, sums).to(q.dtype), weight, dims.value)


def _kept(batch: Sequences, kept: DcpShard) -> Sequences:
    """The same step with what a rank keeps in the first pages of each sequence."""
    pages = batch.pages
    assert pages is not None
    whole = pages.keys[0].flatten(0, 1)
    pool = torch.full_like(whole, float("nan"))
    for table, length in zip(pages.tables.tolist(), pages.lengths.tolist(), strict=True):
        places = torch.tensor([table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(length)])
        own = places[kept.rank :: kept.ranks]
        pool[places[: len(own)]] = whole[own]
    rows = (pool.view_as(pages.keys[0]),)
    return batch._replace(pages=replace(pages, keys=rows, values=rows))
