"""Costs of collectives against counts by hand, and times of all-reduces by algorithm, as measured and between."""

from __future__ import annotations

import pytest

from strata.comm.cost import (
    CollectiveCost,
    HierarchicalCost,
    Network,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    flag_cost,
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
from strata.cost.all_reduce_times import ALGORITHMS, AllReduceTimes
from strata.hardware import measured
from strata.hardware.links import Link
from strata.hardware.prediction import Call, Prediction


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
    assert flag_cost(1200, 4) == CollectiveCost(1, 3600)
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


KIB, MIB = 1 << 10, 1 << 20
# 1 us and 2 us for a MiB that a rank sends, in one shot and by NCCL.
CALLS: list[Call] = [
    *(("one shot", "bfloat16", (2, size), 3e-6 + 2 * size / MIB * 1e-6) for size in (KIB, MIB)),
    *(("nccl", "bfloat16", (2, size), 6e-6 + size / MIB * 2e-6) for size in (KIB, MIB, 64 * MIB)),
]


def times() -> AllReduceTimes:
    found = AllReduceTimes.of(CALLS, latency=2e-6)
    assert found is not None
    return found


def test_what_a_rank_sends_by_each_algorithm_by_hand() -> None:
    assert one_shot_cost(1000, 4) == CollectiveCost(1, 6000)  # packets are twice as large
    assert flag_cost(1000, 4) == CollectiveCost(1, 3000)
    assert two_shot_cost(1000, 4) == CollectiveCost(2, 1500)
    assert tree_cost(1000, 4) == CollectiveCost(4, 1500)
    assert tree_cost(1000, 8).messages == 6
    assert tree_cost(1000, 5).messages == 6


def test_measured_sizes_come_back_and_others_lie_between() -> None:
    found = times()
    assert found.predict("nccl", MIB, 2) == Prediction(pytest.approx(8e-6), "measured")
    assert found.predict("nccl", 16 * MIB, 2) == Prediction(pytest.approx(38e-6), "interpolated")
    assert found.predict("one shot", MIB // 2, 2) == Prediction(pytest.approx(4e-6), "interpolated")
    # A size below what was measured takes what that did; one beyond goes on as before.
    smallest = found.predict("nccl", KIB, 2)
    assert smallest is not None
    assert found.predict("nccl", 4, 2) == Prediction(smallest.seconds, "analytic")
    assert found.predict("nccl", 128 * MIB, 2) == Prediction(pytest.approx(262e-6), "analytic")
    assert found.predict("two shots", MIB, 2) is None


def test_between_more_ranks_the_bytes_of_a_rank_count_and_each_further_message() -> None:
    found = times()
    # In one shot to three others as much as three times the size to one.
    assert found.predict("one shot", MIB // 3, 4) == Prediction(pytest.approx(5e-6, rel=1e-5), "analytic")
    # 64 MiB between eight: 112 MiB are sent, in a tree with four messages more than between two.
    large = found.predict("nccl", 64 * MIB, 8)
    assert large == Prediction(pytest.approx(6e-6 + 224e-6 + 4 * 2e-6), "analytic")


def test_another_collective_of_the_library_takes_as_long_as_its_bytes() -> None:
    assert times().sent(16 * MIB) == Prediction(pytest.approx(38e-6), "analytic")
    assert AllReduceTimes.of((call for call in CALLS if call[0] != "nccl"), 0.0).sent(1) is None  # type: ignore[union-attr]


def test_bad_measurements_are_refused() -> None:
    assert AllReduceTimes.of([], 0.0) is None
    with pytest.raises(ValueError, match="by 'other' is unknown; known are one shot, "):
        AllReduceTimes.of([("other", "bfloat16", (2, KIB), 1e-6)], 0.0)
    with pytest.raises(ValueError, match=r"between \[2, 4\] ranks; give two sizes or more of one number"):
        AllReduceTimes.of([*CALLS, ("nccl", "bfloat16", (4, KIB), 1e-6)], 0.0)
    with pytest.raises(ValueError, match="give two sizes or more"):
        AllReduceTimes.of(CALLS[:1], 0.0)


def test_those_of_the_h200() -> None:
    calls = measured.read("NVIDIA H200")["all_reduce"]
    assert {kind for kind, *_ in calls} == set(ALGORITHMS)
    found = AllReduceTimes.of(calls, 2.33e-6)
    assert found is not None
    for kind, _, (ranks, nbytes), seconds in calls:
        assert found.predict(kind, nbytes, ranks) == Prediction(seconds, "measured")
        assert ALGORITHMS[kind][0](nbytes, ranks).bytes / seconds < 450e9  # the link, each way
