"""Costs of collectives against counts by hand and timings of NCCL on H200s."""

from __future__ import annotations

import pytest

from strata.comm.cost import (
    LINKS,
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    reduce_scatter_cost,
    shift_cost,
)
from strata.hardware.specs import DEVICES


def test_counts_by_hand() -> None:
    """Four ranks, a ring, 1200 bytes: parts of 300 go three hops, and six for the sum that everyone gets."""
    assert all_gather_cost(1200, 4) == CollectiveCost(3, 900)
    assert reduce_scatter_cost(1200, 4) == CollectiveCost(3, 900)
    assert all_reduce_cost(1200, 4) == CollectiveCost(6, 1800)
    assert all_to_all_cost(1200, 4) == CollectiveCost(3, 900)
    assert shift_cost(1200, 4) == CollectiveCost(1, 1200)


def test_one_rank_sends_nothing() -> None:
    for cost in (all_reduce_cost, all_gather_cost, reduce_scatter_cost, all_to_all_cost, shift_cost):
        assert cost(1200, 1) == CollectiveCost(0, 0)
        assert LINKS["h200"].seconds(cost(1200, 1)) == 0


@pytest.mark.parametrize(
    ("cost", "ranks", "nbytes", "microseconds"),
    [
        (all_reduce_cost, 2, 1 << 26, 247.9),
        (all_reduce_cost, 8, 1 << 30, 5238.9),
        (all_gather_cost, 8, 1 << 26, 209.9),
        (reduce_scatter_cost, 4, 1 << 28, 676.1),
        (all_to_all_cost, 8, 1 << 28, 764.6),
        (all_gather_cost, 4, 1 << 17, 35.3),
    ],
)
def test_the_h200_link_predicts_what_nccl_took(cost, ranks, nbytes, microseconds) -> None:  # type: ignore[no-untyped-def]
    assert LINKS["h200"].seconds(cost(nbytes, ranks)) == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_links_belong_to_known_devices_and_stay_below_what_makers_promise() -> None:
    for key, link in LINKS.items():
        assert link.bandwidth < DEVICES[key].ceiling("link", measured=False).value
        assert link.source
