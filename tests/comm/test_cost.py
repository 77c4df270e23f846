"""Costs of collectives against counts by hand."""

from __future__ import annotations

import pytest

from strata.comm.cost import (
    CollectiveCost,
    HierarchicalCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    flagged_cost,
    hierarchical_all_gather_cost,
    hierarchical_all_reduce_cost,
    hierarchical_all_to_all_cost,
    hierarchical_reduce_scatter_cost,
    one_shot_cost,
    reduce_scatter_cost,
    shift_cost,
    tree_cost,
    two_shot_cost,
)
from strata.comm.network import Network
from strata.hardware.links import Link


def test_counts_by_hand() -> None:
    """Four ranks, a ring, 1200 bytes: parts of 300 go three hops, and six for the sum that everyone gets."""
    assert all_gather_cost(1200, 4) == CollectiveCost(3, 900)
    assert reduce_scatter_cost(1200, 4) == CollectiveCost(3, 900)
    assert all_reduce_cost(1200, 4) == CollectiveCost(6, 1800)
    assert all_to_all_cost(1200, 4) == CollectiveCost(3, 900)
    assert shift_cost(1200, 4) == CollectiveCost(1, 1200)


def test_sums_by_other_algorithms_by_hand() -> None:
    """Four ranks, 1200 bytes: all of it to three others, as packets twice as large or behind a flag; parts of 300 to
    three others, twice; up and down a tree of depth two with as many bytes as a ring."""
    assert one_shot_cost(1200, 4) == CollectiveCost(1, 2 * 3600)
    assert flagged_cost(1200, 4) == CollectiveCost(1, 3600)
    assert two_shot_cost(1200, 4) == CollectiveCost(2, 2 * 900)
    assert tree_cost(1200, 4) == CollectiveCost(4, 1800)
    assert tree_cost(1200, 64).messages == 12
    assert all_reduce_cost(1200, 64).messages == 126


def test_two_machines_of_four_by_hand() -> None:
    """9600 bytes. Gathered: a rank has 1200; its counterpart's 1200 cross, then three pairs of 2400 pass."""
    gathered = HierarchicalCost(CollectiveCost(3, 7200), CollectiveCost(1, 1200))
    assert hierarchical_all_gather_cost(9600, 4, 2) == gathered
    assert hierarchical_reduce_scatter_cost(9600, 4, 2) == gathered
    both = HierarchicalCost(CollectiveCost(6, 14400), CollectiveCost(2, 2400))
    assert hierarchical_all_reduce_cost(9600, 4, 2) == both
    # Each of eight is sent 1200: what is for the other machine, 4800, crosses once.
    crossed = HierarchicalCost(CollectiveCost(3, 7200), CollectiveCost(1, 4800))
    assert hierarchical_all_to_all_cost(9600, 4, 2) == crossed


def test_one_machine_is_no_hierarchy() -> None:
    for flat, divided in (
        (all_gather_cost, hierarchical_all_gather_cost),
        (reduce_scatter_cost, hierarchical_reduce_scatter_cost),
        (all_reduce_cost, hierarchical_all_reduce_cost),
        (all_to_all_cost, hierarchical_all_to_all_cost),
    ):
        assert divided(9600, 8, 1) == HierarchicalCost(flat(9600, 8), CollectiveCost())


def test_one_rank_sends_nothing() -> None:
    for cost in (all_reduce_cost, all_gather_cost, reduce_scatter_cost, all_to_all_cost, shift_cost):
        assert cost(1200, 1) == CollectiveCost(0, 0)


FAST, SLOW = Link(0, 1e-6, 100.0, "", ""), Link(0, 5e-6, 10.0, "", "")


def test_a_network_knows_which_ranks_of_an_axis_share_a_machine() -> None:
    network = Network(FAST, 8, SLOW)
    assert network.divided(8, 1) == (8, 1)
    assert network.divided(16, 1) == (8, 2)
    assert network.divided(16, 4) == (2, 8)  # of an axis outside tp = 4 two lie in each machine
    assert network.divided(4, 8) == (1, 4)
    cost = network.cost("all_gather", 9600, 16, 4)
    assert cost == hierarchical_all_gather_cost(9600, 2, 8)
    by_hand = 1e-6 + 4800 / 100 + 7 * 5e-6 + 4800 / 8 * 7 / 10
    assert network.seconds(cost) == pytest.approx(by_hand)
    # In three calls, at half of the bandwidth.
    assert network.seconds(cost, 3, 0.5) == pytest.approx(3 * (1e-6 + 35e-6) + 2 * (by_hand - 36e-6))


def test_machines_without_a_link_between_them_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16 ranks, 1 apart, lie in 2 machines of 8 devices, .* give its bandwidth"):
        Network(FAST, 8).divided(16, 1)
