"""The clock on the host measures what runs, and only that."""

from __future__ import annotations

import time

import pytest

from strata.hardware.clock import Timing, time_cpu


def test_median_of_the_runs_after_warm_up() -> None:
    pauses = iter([0.05, 0.05, 0.002, 0.03, 0.002])  # two to warm up, one outlier
    timing = time_cpu(lambda: time.sleep(next(pauses)), repeats=3, warmup=2)
    assert len(timing.runs) == 3
    assert 0.002 <= timing.seconds < 0.03
    assert max(timing.runs) >= 0.03


def test_median_of_an_even_number_lies_between() -> None:
    assert Timing((1.0, 4.0, 2.0, 100.0)).seconds == pytest.approx(3.0)
