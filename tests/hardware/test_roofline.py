"""The roofline against arithmetic on paper, and links against timings of NCCL and what makers promise."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from strata.comm.cost import all_gather_cost, all_reduce_cost, all_to_all_cost, reduce_scatter_cost
from strata.hardware.links import LINKS, Link, link_of
from strata.hardware.roofline import Cost, floor, steps_floor
from strata.hardware.specs import DEVICES, device


def test_the_slower_of_compute_and_memory_sets_the_floor() -> None:
    h200 = device("h200")
    # A square product of 4096 in bf16: 137 GFLOP, 100 MB.
    square = floor(Cost(flops=2 * 4096**3, read=4 * 4096**2, written=2 * 4096**2), h200, "bfloat16")
    assert (square.seconds, square.bound) == (pytest.approx(171.8e-6, rel=1e-3), "compute")
    # The same weights with one row.
    row = floor(Cost(flops=2 * 4096**2, read=2 * 4096**2 + 8192, written=8192), h200, "bfloat16")
    assert (row.seconds, row.bound) == (pytest.approx(7.84e-6, rel=1e-3), "memory")


def test_messages_have_a_floor_where_there_is_a_link() -> None:
    h200 = device("h200")
    cost = Cost(read=64 << 10, written=64 << 10, messages=1, sent=64 << 10)
    on_link = floor(cost, h200, "bfloat16", LINKS["h200"])
    assert (on_link.seconds, on_link.bound) == (pytest.approx(1.96e-6 + 65536 / 359e9), "communication")
    alone = floor(cost, h200, "bfloat16")
    assert (alone.communication, alone.bound) == (0, "memory")


def test_costs_add_part_by_part() -> None:
    added = Cost(1, 20, 300, 4) + Cost(5, 60, 700, 8)
    assert added == Cost(6, 80, 1000, 12)
    assert added.bytes == 1080
    sent = Cost(messages=1, sent=5) + Cost(messages=2, sent=6)
    assert sent == Cost(messages=3, sent=11) == sent.in_step
    assert sent - sent == Cost()


def test_a_schedule_takes_each_step_at_its_own_floor() -> None:
    h200 = device("h200")
    steps = [Cost(flops=800 * 10**9), Cost(read=4280 * 10**6)]  # a millisecond of each kind
    assert steps_floor(steps, h200, "bfloat16") == pytest.approx(2e-3)
    assert floor(steps[0] + steps[1], h200, "bfloat16").seconds == pytest.approx(1e-3)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


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
    sends = cost(nbytes, ranks)
    assert LINKS["h200"].seconds(sends.messages, sends.bytes) == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_nothing_takes_no_time_and_floors_count_the_best_without_a_start() -> None:
    link = LINKS["h200"]
    assert link.seconds(0, 0) == link.min_seconds(0, 0) == 0
    assert link.seconds(2, 339_000) == pytest.approx(25.1e-6 + 2 * 2.33e-6 + 1e-6)
    assert link.min_seconds(2, 359_000) == pytest.approx(2 * 1.96e-6 + 1e-6)
    assert Link(5.0, 1.0, 100.0, "", "").min_seconds(2, 100) == 3


def test_no_measured_message_was_shorter_than_its_floor() -> None:
    """Messages of 1 KiB to 32 MiB in CUDA graphs between two and four H200."""
    records = [json.loads(line) for line in (RESULTS / "h200_parallel.jsonl").read_text().splitlines()]
    messages = [line for record in records if record["test"] == "comm" for line in record["results"]]
    assert {(line["ranks"], line["operation"]) for line in messages} >= set(product((2, 4), COLLECTIVES))
    for line in messages:
        assert min(line["all"]) * 1e-6 >= LINKS["h200"].min_seconds(1, line["sent"]), line


def test_links_belong_to_known_devices_and_stay_below_what_makers_promise() -> None:
    for key, link in LINKS.items():
        assert link.bandwidth < DEVICES[key].ceiling("link", measured=False).value
        assert link.source


def test_devices_without_measured_links() -> None:
    assert link_of(device("h200")) is LINKS["h200"]
    promised = link_of(device("h100"))
    assert (promised.latency, promised.bandwidth) == (0, 450e9)
    with pytest.raises(ValueError, match="no link is recorded for l40s"):
        link_of(device("l40s"))
