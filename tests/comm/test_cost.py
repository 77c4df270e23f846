"""Costs of collectives against counts by hand."""

from __future__ import annotations

from strata.comm.cost import (
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    reduce_scatter_cost,
    shift_cost,
)


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
