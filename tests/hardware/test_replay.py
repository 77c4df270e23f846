"""What a measurement of many replays says."""

from __future__ import annotations

import pytest

from strata.hardware.replay import Timing


def test_the_median_counts_whatever_single_runs_took() -> None:
    assert Timing((2.0, 100.0, 1.0)).seconds == 2.0


def test_median_of_an_even_number_lies_between() -> None:
    assert Timing((1.0, 4.0, 2.0, 100.0)).seconds == pytest.approx(3.0)
