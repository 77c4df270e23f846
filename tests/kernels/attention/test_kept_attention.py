"""Attention of ranks to the keys that each keeps: joined, it is that of each query to all keys of its sequence."""

from __future__ import annotations

import pytest
import torch

from strata.comm.join_heads import join_heads, joined
from strata.comm.operations import Along
from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.divided.kept import kept_attention
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.state.kept_keys import KeptKeys
from tests.kernels.attention.cases import KEPT_LENGTHS as LENGTHS
from tests.kernels.attention.cases import KEPT_NEW as NEW
from tests.kernels.attention.cases import Case, kept_batch

SPEC = AttentionSpec(0, 0.3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("implementation", ["reference", "by sequence"])
def test_every_query_of_a_mixed_batch(implementation: str, ranks: int) -> None:
    run = kept_attention.reference
    if implementation != "reference":
        (made,) = (one for one in kept_attention.implementations if one.name == implementation)
        run = kept_attention.of_arguments(made.run)
    case = Case.random(LENGTHS, heads=6, kv_heads=2, head_dim=20)
    found = []
    for rank in range(ranks):
        kept = KeptKeys(ranks, rank)
        found.append(run(*kept_batch(case, NEW, kept), SPEC, kept))
        assert not bool(found[-1][0].isnan().any())
    mixed, sums = (torch.stack(parts) for parts in zip(*found, strict=True))
    torch.testing.assert_close(joined(mixed, sums).double(), case.wanted(NEW, 0.3), rtol=1e-5, atol=1e-5)
    # Who keeps no key up to a query's position has found nothing.
    position = torch.cat([torch.arange(total - new, total) for total, new in zip(LENGTHS, NEW, strict=True)])
    for rank in range(ranks):
        assert torch.equal((sums[rank] == -torch.inf).all(1), position < rank)
        assert not mixed[rank, position < rank].any()


def test_bfloat16_by_the_library_is_near_the_reference() -> None:
    case, kept = Case.random(LENGTHS, heads=4, kv_heads=1, head_dim=32, dtype=torch.bfloat16), KeptKeys(2, 1)
    given = *kept_batch(case, NEW, kept), SPEC, kept
    for found, wanted in zip(kept_attention(*given), kept_attention.reference(*given), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_rows_of_padding_are_finite() -> None:
    case, kept = Case.random([7, 3], heads=2, kv_heads=1, head_dim=16), KeptKeys(2, 0)
    q, k, v, batch = kept_batch(case, [1, 1], kept)
    batch.pages.lengths[1] = 0
    mixed, sums = kept_attention(q, k, v, batch, SPEC, kept)
    assert bool(mixed.isfinite().all())
    assert bool(joined(mixed[None], sums[None]).isfinite().all())


def test_costs_by_hand() -> None:
    """A decode of 5 tokens, of which rank 1 of 2 keeps 2; and a chunk of positions 2 and 3, which see 1 and 2 there."""
    case, kept = Case.random([5, 4], heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16), KeptKeys(2, 1)
    cost = kept_attention.cost(*kept_batch(case, [1, 2], kept), SPEC, kept, workload=Workload((1, 2), (5, 4)))
    keys, written = 2 * (2 + 2) * 2 * 16 * 2, 3 * 4 * (16 + 1) * 4
    assert cost == Cost(4 * 4 * 16 * (2 + 1 + 2), 3 * 4 * 16 * 2 + keys, written, cached=keys)
    mixed, sums = torch.empty(3, 4, 16, device="meta"), torch.empty(3, 4, device="meta")
    own = join_heads.meta(mixed, Along("dcp", 2), sums, torch.bfloat16)
    assert (own.shape, own.dtype) == ((3, 2, 16), torch.bfloat16)
    cost = join_heads.cost(mixed, Along("dcp", 2), sums, torch.bfloat16, workload=Workload((3,), (3,)))
    assert (cost.messages, cost.sent) == (1, 3 * 2 * 17 * 4)
    assert cost.written == 2 * 3 * 4 * 17 * 4 + 3 * 2 * 16 * 2
