"""Latent attention to rows that ranks keep apart and have gathered (see `kernels.attention.divided.gathered`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.divided.gathered import as_one_layer, copied_cost, whole_pages
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.latent.attention import latent_attention
from strata.kernels.latent.forms import LatentCall
from strata.kernels.op import ATEN, operation
from strata.kernels.state.kept_keys import KeptKeys


class GatheredLatentCall(NamedTuple):
    """The operands of `gathered_latent_attention`, as those of `latent_attention`. gathered: [ranks * pages, 1,
    page_size, 1, rank + rope], the `kept_rows` of each rank."""

    q: Tensor
    row: Tensor
    weight: Tensor
    batch: PackedBatch
    spec: AttentionSpec
    gathered: Tensor
    kept: KeptKeys

    @property
    def whole(self) -> LatentCall:
        """The call of `latent_attention` over pages of all tokens."""
        batch = whole_pages(self.batch, self.gathered, self.kept)
        return LatentCall(self.q, self.row, self.weight, batch, as_one_layer(self.spec))


def _cost(call: GatheredLatentCall, *, workload: Workload) -> Cost:
    own: Cost = latent_attention.cost(*call[:5], workload=workload)
    return own + copied_cost(call.gathered)


def _meta(call: GatheredLatentCall) -> Tensor:
    found: Tensor = latent_attention.meta(*call[:5])
    return found


@operation(_cost, operands=GatheredLatentCall, meta=_meta, reads_state=True)
def gathered_latent_attention(call: GatheredLatentCall) -> Tensor:
    """`latent_attention` to the rows of all ranks."""
    result: Tensor = latent_attention.reference(*call.whole)
    return result


def _by(device: str) -> Callable[..., Tensor]:
    attend = latent_attention.bind(device)

    def run(call: GatheredLatentCall) -> Tensor:
        result: Tensor = attend(*call.whole)
        return result

    return run


def _kernels(call: GatheredLatentCall) -> tuple[Any, ...]:
    return (ATEN, *latent_attention.bind("cuda").launches(*call.whole))


def _scratch(call: GatheredLatentCall) -> int:
    """The whole pages, and what attention to them needs."""
    return call.gathered.nbytes + latent_attention.bind("cuda").scratch(*call.whole)


gathered_latent_attention.implement("composed", "cpu")(_by("cpu"))
gathered_latent_attention.implement("composed", "cuda", kernels=_kernels, scratch=_scratch)(_by("cuda"))
