"""The learning rate against a count by hand."""

from __future__ import annotations

import pytest

from strata.train.learning_rate import learning_rate


def test_ten_steps_by_hand() -> None:
    rates = [learning_rate(step, peak=1.0, steps=10, warmup=4, decay=5) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_without_warmup_or_decay() -> None:
    assert [learning_rate(step, peak=3.0, steps=3, warmup=0, decay=0) for step in range(3)] == [3.0, 3.0, 3.0]


def test_longer_stable_phase_leaves_the_beginning_alone() -> None:
    short = [learning_rate(step, peak=1.0, steps=20, warmup=3, decay=5) for step in range(15)]
    assert short == [learning_rate(step, peak=1.0, steps=40, warmup=3, decay=5) for step in range(15)]
