"""Steps of latent attention: pages in no order, what nobody wrote is not a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.latent.forms import Dims
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


def with_parts(call: Call, decodes: int, *, recorded: bool) -> Call:
    """The same step, of which the first sequences are known to decode, or only the device knows it."""
    q, row, weight, batch, spec = call
    assert batch.pages is not None
    lengths, starts = batch.pages.lengths.clone(), batch.offsets[:-1].clone()
    lengths[decodes:] = 0
    starts[:decodes] = batch.offsets[1 : decodes + 1]
    bounds = torch.tensor([decodes, len(lengths)], dtype=torch.int32)
    parts = BatchParts(lengths, starts, bounds, None if recorded else decodes)
    return q, row, weight, batch._replace(pages=replace(batch.pages, parts=parts)), spec
