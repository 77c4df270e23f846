"""The roofline against arithmetic on paper."""

from __future__ import annotations

import pytest

from strata.hardware.links import LINKS
from strata.hardware.roofline import Cost, floor, steps_floor
from strata.hardware.specs import device


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
    assert sent == Cost(messages=3, sent=11) == sent.least
    assert sent - sent == Cost()


def test_a_schedule_takes_each_step_at_its_own_floor() -> None:
    h200 = device("h200")
    steps = [Cost(flops=800 * 10**9), Cost(read=4280 * 10**6)]  # a millisecond of each kind
    assert steps_floor(steps, h200, "bfloat16") == pytest.approx(2e-3)
    assert floor(steps[0] + steps[1], h200, "bfloat16").seconds == pytest.approx(1e-3)
