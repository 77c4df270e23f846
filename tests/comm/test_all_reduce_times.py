"""Times of all-reduces by algorithm: as measured, between sizes, and between more ranks."""

from __future__ import annotations

import pytest

from strata.comm.cost import CollectiveCost, flagged_cost, one_shot_cost, tree_cost, two_shot_cost
from strata.cost.all_reduce_times import ALGORITHMS, AllReduceTimes
from strata.hardware import measured
from strata.hardware.prediction import Call, Prediction

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


def test_what_a_rank_sends_by_each_algorithm() -> None:
    assert one_shot_cost(1000, 4) == CollectiveCost(1, 6000)  # packets are twice as large
    assert flagged_cost(1000, 4) == CollectiveCost(1, 3000)
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
