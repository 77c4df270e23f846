"""Latent attention to rows that ranks keep apart and have gathered (see `kernels.attention.divided.gathered`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.divided.gathered import as_one_layer, copied_cost, whole_pages
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.latent.attention import latent_attention
from strata.kernels.op import ATEN, operation
from strata.kernels.state.kept_keys import KeptKeys


def _cost(
    q: Tensor,
    row: Tensor,
    weight: Tensor,
    batch: PackedBatch,
    spec: AttentionSpec,
    gathered: Tensor,
    kept: KeptKeys,
    *,
    workload: Workload,
) -> Cost:
    own: Cost = latent_attention.cost(q, row, weight, batch, spec, workload=workload)
    return own + copied_cost(gathered)


def _meta(
    q: Tensor, row: Tensor, weight: Tensor, batch: PackedBatch, spec: AttentionSpec, gathered: Tensor, kept: KeptKeys
) -> Tensor:
    found: Tensor = latent_attention.meta(q, row, weight, batch, spec)
    return found


@operation(_cost, meta=_meta, reads_state=True)
def gathered_latent_attention(
    q: Tensor, row: Tensor, weight: Tensor, batch: PackedBatch, spec: AttentionSpec, gathered: Tensor, kept: KeptKeys
) -> Tensor:
    """`latent_attention` to the rows of all ranks. gathered: [ranks * pages, 1, page_size, 1, rank + rope], the
    `kept_rows` of each."""
    result: Tensor = latent_attention.reference(q, row, weight, whole_pages(batch, gathered, kept), as_one_layer(spec))
    return result


def _by(device: str) -> Callable[..., Tensor]:
    attend = latent_attention.bind(device)

    def run(
        q: Tensor,
        row: Tensor,
        weight: Tensor,
        batch: PackedBatch,
        spec: AttentionSpec,
        gathered: Tensor,
        kept: KeptKeys,
    ) -> Tensor:
        result: Tensor = attend(q, row, weight, whole_pages(batch, gathered, kept), as_one_layer(spec))
        return result

    return run


def _kernels(
    q: Tensor, row: Tensor, weight: Tensor, batch: PackedBatch, spec: AttentionSpec, gathered: Tensor, kept: KeptKeys
) -> tuple[Any, ...]:
    whole = whole_pages(batch, gathered, kept)
    return (ATEN, *latent_attention.bind("cuda").launches(q, row, weight, whole, as_one_layer(spec)))


def _scratch(
    q: Tensor, row: Tensor, weight: Tensor, batch: PackedBatch, spec: AttentionSpec, gathered: Tensor, kept: KeptKeys
) -> int:
    """The whole pages, and what attention to them needs."""
    whole = whole_pages(batch, gathered, kept)
    return gathered.nbytes + latent_attention.bind("cuda").scratch(q, row, weight, whole, as_one_layer(spec))


gathered_latent_attention.implement("composed", "cpu")(_by("cpu"))
gathered_latent_attention.implement("composed", "cuda", kernels=_kernels, scratch=_scratch)(_by("cuda"))
