"""The learning rate against a count by hand, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from strata.train.optimizer.config import learning_rate


def test_ten_steps_by_hand() -> None:
    rates = [learning_rate(step, peak=1.0, steps=10, warmup=4, decay=5) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_without_warmup_or_decay() -> None:
    assert [learning_rate(step, peak=3.0, steps=3, warmup=0, decay=0) for step in range(3)] == [3.0, 3.0, 3.0]


def test_longer_stable_phase_leaves_the_beginning_alone() -> None:
    short = [learning_rate(step, peak=1.0, steps=20, warmup=3, decay=5) for step in range(15)]
    assert short == [learning_rate(step, peak=1.0, steps=40, warmup=3, decay=5) for step in range(15)]


@pytest.mark.parametrize(
    ("name", "options", "theirs", "theirs_options"),
    [
        ("cosine", {}, "cosine", {}),
        ("cosine", {"min_lr_factor": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("linear", {}, "linear", {}),
        ("constant", {}, "constant_with_warmup", {}),
        (
            "warmup_stable_decay",
            {"decay": 5},
            "warmup_stable_decay",
            {"num_decay_steps": 5, "decay_type": "linear"},
        ),
    ],
)
def test_schedules_are_those_of_transformers(
    name: str, options: dict[str, Any], theirs: str, theirs_options: dict[str, Any]
) -> None:
    """Whose warm-up begins with a rate of 0: it is a step behind."""
    steps, warmup = 20, 4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(theirs, optimizer, warmup, steps, theirs_options)
    wanted = []
    for _ in range(steps):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = [learning_rate(step, peak=3e-4, steps=steps, warmup=warmup, name=name, **options) for step in range(steps)]
    assert found[: warmup - 1] == pytest.approx(wanted[1:warmup])
    assert found[warmup - 1 :] == pytest.approx([3e-4, *wanted[warmup:]])


def test_what_falls_ends_at_a_share_of_the_peak() -> None:
    """Not in the warm-up, which begins at 0 in any case."""
    rates = [learning_rate(step, peak=2.0, steps=6, warmup=2, decay=2, min_lr_factor=0.5) for step in range(7)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0])
    rates = [learning_rate(step, peak=2.0, steps=6, warmup=2, name="linear", min_lr_factor=0.5) for step in range(7)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_run_may_be_nothing_but_warm_up(name: str) -> None:
    assert [learning_rate(step, peak=1.0, steps=2, warmup=2, name=name) for step in range(2)] == [0.5, 1.0]
