"""What the guard of a run decides from its losses and norms."""

from __future__ import annotations

import json
import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.train.faults.config import FaultsConfig
from strata.train.faults.guard import LossGuard, StepVerdict, VerdictKind

WINDOW = 16
ROLLBACK = FaultsConfig(spike="rollback", spike_window=WINDOW, max_spikes=1, max_skipped=2)
# Losses near 2, and now and then one that spikes; norms near 1, and now and then one that is not finite.
LOSSES = st.one_of(st.floats(1.9, 2.1), st.floats(1.9, 2.1), st.floats(1.9, 2.1), st.floats(5.0, 9.0))
NORMS = st.one_of(*[st.floats(0.5, 2.0)] * 5, st.sampled_from([math.inf, math.nan]))
RUNS = st.lists(st.tuples(LOSSES, NORMS), min_size=WINDOW, max_size=4 * WINDOW)


def judged(guard: LossGuard, run: list[tuple[float, float]], first: int = 1) -> list[StepVerdict]:
    return [guard.observe(step, loss, norm) for step, (loss, norm) in enumerate(run, first)]


def calm(steps: int) -> list[tuple[float, float]]:
    chance = random.Random(0)
    return [(2 + chance.gauss(0, 0.05), 1.0) for _ in range(steps)]


def test_steps_that_are_not_finite_are_skipped_until_there_are_too_many() -> None:
    guard = LossGuard(ROLLBACK)
    bad = [(math.nan, math.inf)] * 2
    assert [one.kind for one in judged(guard, bad)] == [VerdictKind.SKIPPED] * 2
    assert judged(guard, calm(1), 3) == [StepVerdict(VerdictKind.OK)]
    first, _, last = judged(guard, [*bad, (2.0, math.nan)], 4)
    assert first.reason == "step 4: loss nan, gradient norm inf: not finite; skipped (1 in a row, at most 2)"
    assert last == StepVerdict(
        VerdictKind.STOP,
        "steps 4 to 6 have gradients that are not finite (norms inf, inf, nan), more in a row than faults.max_skipped "
        "= 2; lower optimizer.learning_rate and resume from the last checkpoint",
    )


def test_a_run_stops_at_the_first_if_asked_or_if_the_weights_have_changed() -> None:
    stopping = LossGuard(FaultsConfig(non_finite="stop"))
    assert stopping.observe(9, 2.0, math.inf).kind is VerdictKind.STOP
    changed = LossGuard(FaultsConfig()).observe(9, math.nan, 3.0)
    assert changed.kind is VerdictKind.STOP
    assert "step 9: the loss is nan, but its gradient has the norm 3, so the weights have changed" in changed.reason


@pytest.mark.parametrize(
    ("spike", "kind"), [("ignore", VerdictKind.OK), ("report", VerdictKind.SPIKE), ("rollback", VerdictKind.SPIKE)]
)
def test_a_spike_stands_out_of_the_scatter_of_the_losses_before(spike: str, kind: VerdictKind) -> None:
    guard = LossGuard(FaultsConfig(spike=spike, spike_window=64, spike_sigma=6))
    assert {one.kind for one in judged(guard, calm(400))} == {VerdictKind.OK}
    assert guard.observe(401, 2 + 12 * 0.05, 1.0).kind is kind
    assert guard.observe(402, 2 + 3 * 0.05, 1.0).kind is VerdictKind.OK
    assert guard.observe(403, 1.0, 1.0).kind is VerdictKind.OK  # falling is what losses should do


def test_nothing_spikes_before_there_are_enough_losses_to_judge_by() -> None:
    assert {one.kind for one in judged(LossGuard(ROLLBACK), [*calm(WINDOW - 1), (100.0, 1.0)])} == {VerdictKind.OK}


def test_rolling_back_leaves_the_samples_of_the_spiking_steps_out() -> None:
    guard = LossGuard(ROLLBACK)
    judged(guard, calm(30))
    saved = json.loads(json.dumps(guard.state()))  # of a checkpoint after 30 steps
    judged(guard, calm(10), 31)
    assert [one.kind for one in judged(guard, [(9.0, 1.0)], 41)] == [VerdictKind.SPIKE]
    (verdict,) = judged(guard, [(9.5, 1.0)], 42)
    assert (verdict.kind, verdict.before) == (VerdictKind.ROLLBACK, 41)
    assert "back to before it, and on without the samples of steps 41 to 42" in verdict.reason
    guard.roll_back(saved)
    assert [guard.data_step(step) for step in (31, 40, 41, 42)] == [31, 40, 43, 44]
    # A second time within the window it is not the samples.
    judged(guard, calm(12), 31)
    (_, stop) = judged(guard, [(9.0, 1.0), (9.0, 1.0)], 43)
    assert stop.kind is VerdictKind.STOP
    assert "within 16 steps of step 42, which was rolled back: it is not the samples" in stop.reason


def test_another_spike_far_away_is_rolled_back_as_well() -> None:
    guard = LossGuard(ROLLBACK)
    judged(guard, [*calm(30), (9.0, 1.0), (9.0, 1.0)])
    guard.roll_back(LossGuard(ROLLBACK).state())
    judged(guard, calm(70), 1)
    last = judged(guard, [(9.0, 1.0), (9.0, 1.0)], 71)[-1]
    assert (last.kind, last.before) == (VerdictKind.ROLLBACK, 71)
    assert [guard.data_step(step) for step in (30, 31, 70, 71)] == [30, 33, 72, 75]


@given(run=RUNS, cut=st.integers(0, 4 * WINDOW), rolled=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_resumed_run_decides_alike(run: list[tuple[float, float]], cut: int, rolled: bool) -> None:
    whole, first, second = LossGuard(ROLLBACK), LossGuard(ROLLBACK), LossGuard(ROLLBACK)
    if rolled:
        for guard in (whole, first):
            judged(guard, [*calm(WINDOW), (9.0, 1.0), (9.0, 1.0)])
    cut = min(cut, len(run))
    wanted = judged(whole, run, 31)
    found = judged(first, run[:cut], 31)
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    found += judged(second, run[cut:], 31 + cut)
    assert found == wanted
    assert second.state() == whole.state()


@given(run=RUNS, exponent=st.integers(-3, 3))
@settings(max_examples=40, deadline=None)
def test_the_unit_of_the_loss_decides_nothing(run: list[tuple[float, float]], exponent: int) -> None:
    scaled = [(loss * 2.0**exponent, norm) for loss, norm in run]
    kinds = [one.kind for one in judged(LossGuard(ROLLBACK), run)]
    assert [one.kind for one in judged(LossGuard(ROLLBACK), scaled)] == kinds


@given(run=RUNS)
@settings(max_examples=60, deadline=None)
def test_verdicts_are_those_of_the_definition(run: list[tuple[float, float]]) -> None:
    """Against the definition, written for a whole run at once."""
    guard = LossGuard(FaultsConfig(spike_window=WINDOW, max_skipped=2))
    finite: list[float] = []
    in_a_row = 0
    for verdict, (loss, norm) in zip(judged(guard, run), run, strict=True):
        if not math.isfinite(norm):
            in_a_row += 1
            assert verdict.kind is (VerdictKind.STOP if in_a_row > 2 else VerdictKind.SKIPPED)
            continue
        in_a_row = 0
        last = finite[-WINDOW:]
        spread = max(1.4826 * median(abs(one - median(last)) for one in last), 1e-3 * median(last)) if last else 0.0
        spikes = len(last) == WINDOW and loss > median(last) + 8 * spread
        assert verdict.kind is (VerdictKind.SPIKE if spikes else VerdictKind.OK)
        finite.append(loss)


@given(run=RUNS)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_trained_on_or_left_out_once(run: list[tuple[float, float]]) -> None:
    guard = LossGuard(ROLLBACK)
    verdicts = judged(guard, [*calm(WINDOW), *run, (9.0, 1.0), (9.0, 1.0)])
    used = [guard.data_step(step) for step in range(1, 200)]
    assert used == sorted(set(used))
    left_out = sum(last - first + 1 for first, last in guard.state()["left_out"])
    assert used[-1] - len(used) == left_out
    assert (left_out > 0) == any(one.kind is VerdictKind.ROLLBACK for one in verdicts)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("non_finite", "ignore", "faults.non_finite = 'ignore' must be one of skip, stop"),
        ("spike", "skip", "faults.spike = 'skip' must be one of ignore, report, rollback"),
        ("spike_window", 4, "faults.spike_window = 4 must be at least 8"),
        ("max_skipped", -1, "faults.max_skipped = -1 must be at least 0"),
        ("spike_sigma", math.nan, "faults.spike_sigma = nan must be positive and finite"),
    ],
)
def test_wrong_values_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FaultsConfig(**{field: value})  # type: ignore[arg-type]
