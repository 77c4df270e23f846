"""What watches a run: its losses and norms, ranks that hang, and ranks that are slow."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.observer import CollectiveCall
from strata.train.data.loader import DataPosition, LoadedStep, Position
from strata.train.faults.config import FaultsConfig
from strata.train.faults.guard import LossGuard, StepVerdict, VerdictKind
from strata.train.faults.hang import HUNG
from strata.train.faults.hang_diagnosis import Heartbeat, diagnose
from strata.train.faults.stragglers import ComputeClock, Stragglers
from strata.train.meter import Meter
from strata.train.predict.flops import StepFlops
from tests.parallel.ranks import run_ranks
from tests.train.fault_ranks import HANG_SECONDS

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


SHARD = (0, 1, 2, 3)
NOW = 1000.0


def calls(axis: str, ranks: tuple[int, ...], count: int) -> tuple[CollectiveCall, ...]:
    return tuple(
        CollectiveCall("all_gather" if number % 2 else "reduce_scatter", axis, ranks, number, 64)
        for number in range(1, count + 1)
    )


def beat(
    rank: int, step: int, phase: str, *lines: tuple[CollectiveCall, ...], waits: CollectiveCall | None = None
) -> Heartbeat:
    last = tuple(line[-1] for line in lines if line)
    recent = tuple(call for line in lines for call in line)
    return Heartbeat(rank, step, phase, 2.0, NOW, True, waits, last, recent)


def test_the_rank_that_never_entered_a_collective_is_blamed() -> None:
    entered = calls("shard", SHARD, 8)
    beats = [beat(rank, 41, "reduce", entered, waits=entered[7]) for rank in SHARD]
    beats[3] = beat(3, 41, "backward", entered[:7])
    assert diagnose(beats, NOW, 1.0) == (
        "rank 3 is at step 41, backward, and never entered reduce_scatter 8 of 'shard' (64 bytes) "
        "that ranks 0-2 wait in"
    )


def test_of_two_axes_the_rank_that_waits_for_nobody_is_blamed() -> None:
    """Rank 3 stops; rank 2 waits for it along tp, and so never comes to where 0 and 1 wait along dp."""
    first, second = calls("tp", (2, 3), 5), calls("tp", (0, 1), 6)
    along = {0: calls("dp", (0, 2), 2), 1: calls("dp", (1, 3), 2)}
    beats = [
        beat(0, 7, "reduce", second, along[0], waits=along[0][1]),
        beat(1, 7, "reduce", second, along[1], waits=along[1][1]),
        beat(2, 7, "forward", first, along[0][:1], waits=first[4]),
        beat(3, 7, "forward", first[:4], along[1][:1]),
    ]
    assert diagnose(beats, NOW, 1.0).startswith("rank 3 is at step 7, forward, and never entered ")


def test_ranks_that_are_no_longer_heard_of_are_blamed() -> None:
    entered = calls("shard", SHARD, 2)
    beats: list[Heartbeat | None] = [beat(rank, 3, "reduce", entered, waits=entered[1]) for rank in SHARD]
    beats[1] = replace(beat(1, 3, "data", entered[:1]), hangs=False, time=NOW - 7)
    assert diagnose(beats, NOW, 1.0) == (
        "rank 1 last wrote a heartbeat 7 s ago, at step 3, data: frozen, or its machine is out of reach; "
        "ranks 0, 2-3 wait in reduce_scatter 2 of 'shard' (64 bytes)"
    )
    beats[1] = None
    assert diagnose(beats, NOW, 1.0).startswith("rank 1 never wrote a heartbeat; ranks 0, 2-3 wait in ")


def test_without_a_missing_collective_the_rank_in_none_or_behind_is_blamed() -> None:
    entered = calls("shard", (0, 1), 3)
    waiting = beat(0, 9, "update", entered, waits=entered[2])
    assert diagnose([waiting, beat(1, 9, "checkpoint", entered)], NOW, 1.0) == (
        "rank 1 is at step 9, checkpoint, in no collective; rank 0 waits in all_gather 3 of 'shard' (64 bytes)"
    )
    assert diagnose([beat(0, 9, "data"), beat(1, 8, "log")], NOW, 1.0) == (
        "rank 1 is at step 8, log; the others are at step 9"
    )
    assert diagnose([beat(rank, 9, "update", entered) for rank in (0, 1)], NOW, 1.0) == (
        "ranks 0-1 are at step 9, update, and all have entered the same collectives, up to all_gather 3 of 'shard' "
        "(64 bytes): if no rank computes, a device or the network stands still"
    )


def test_heartbeats_are_json() -> None:
    entered = calls("shard", SHARD, 3)
    for one in (beat(1, 2, "data"), beat(1, 2, "reduce", entered, waits=entered[2])):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Heartbeat) == one


def run(name: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of three ranks."""
    command = [sys.executable, "-m", "tests.train.fault_ranks", "launch", "3", "0", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def pause_of(folder: Path) -> float:
    """Seconds from the last progress of any rank to the report."""
    report = json.loads(next(folder.glob("hang-*.json")).read_text())
    return report["time"] - max(one["time"] - one["seconds"] for one in report["ranks"])


def test_a_rank_that_stops_in_a_backward_pass_is_named_with_its_collective(tmp_path: Path) -> None:
    code, said = run("sleeps", tmp_path)
    assert code == HUNG
    (line,) = [line for line in said.splitlines() if "no progress" in line]
    assert line.startswith(
        f"strata: no progress for {HANG_SECONDS:g} s: rank 1 is at step 5, backward, and never entered reduce_scatter "
    ), said
    assert "of 'shard'" in line
    assert "that ranks 0, 2 wait in" in line
    assert f"failed with exit code {HUNG}" in said
    folder = tmp_path / "faults"
    assert HANG_SECONDS <= pause_of(folder) < 1.5 * HANG_SECONDS
    assert "in stop" in (folder / "rank-001.txt").read_text()  # the function that sleeps
    assert "in wait" in (folder / "rank-000.txt").read_text()
    for rank in range(3):
        noted = msgspec.json.decode((folder / f"rank-{rank:03}.json").read_bytes(), type=Heartbeat)
        assert (noted.rank, noted.step, noted.hangs) == (rank, 5, True)


def test_a_frozen_rank_is_named_by_one_that_lives(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, said = run("freezes", tmp_path)
    assert code == HUNG
    (line,) = [line for line in said.splitlines() if "no progress" in line]
    assert "rank 0 last wrote a heartbeat" in line
    assert "at step 3, data: frozen" in line
    assert "ranks 1-2 wait in all_reduce 3 of 'dp' (16 bytes)" in line
    assert time.monotonic() - begun < 200  # in which three ranks import torch


CONFIG = FaultsConfig(straggler_share=0.1, straggler_intervals=2)


def test_a_rank_is_slow_after_several_intervals_in_a_row() -> None:
    stragglers = Stragglers(CONFIG, 4)
    first = stragglers.judge([1.0, 1.0, 1.3, 1.05], 2.0)
    assert (first.rank, first.line) == (2, "")
    assert first.share == pytest.approx(0.275 / 2)
    second = stragglers.judge([1.0, 1.0, 1.2, 1.0], 2.0)
    assert second.line == "slower than the median of 1000.0 ms a step for 2 intervals: rank 2 1200.0 ms (+20%)"
    assert stragglers.judge([1.0, 1.0, 1.0, 1.0], 2.0).line == ""
    assert stragglers.judge([1.0, 1.0, 1.2, 1.0], 2.0).line == ""


def test_what_is_recorded_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA answers no question about an event that was recorded into a graph."""

    class Event:
        def __init__(self, **_: object) -> None:
            assert not torch.cuda.is_current_stream_capturing()

        def record(self) -> None: ...
        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 2000.0

    clock = ComputeClock(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=captures: now)
        clock.begin()
        clock.end()
    assert clock.take() == [2.0]


def three(world: World, folder: Path) -> list[Any]:
    """Rank 1 computes longer in two intervals of three steps."""
    axis = Mesh.of(world, {"dp": world.size}).axis("dp")
    clock = ComputeClock(world.device)
    meter = Meter(CONFIG, axis, world.size, world.device, clock)
    lines = []
    for interval in (1, 2):
        for _ in range(3):
            clock.begin()
            time.sleep(0.24 if world.rank == 1 else 0.06)
            clock.end()
            meter.count(LoadedStep([], DataPosition(), 0, 1.0), StepFlops())
        values, about_ranks = meter.line(Position(step=3 * interval), 1e-3)
        lines.append([values["slowest_rank"], values["slowest_share"], about_ranks])
    return lines


def test_ranks_exchange_what_they_measured(tmp_path: Path) -> None:
    ranks = run_ranks(three, 3, tmp_path)
    for first, second in ranks:
        assert [first[0], second[0]] == [1, 1]
        assert first[1] > 0
        assert first[2] == ""
        assert re.search(r": rank 1 \d+\.\d ms \(\+\d+%\)$", second[2]), second  # a sleep may take longer
    assert len({json.dumps(one[1][2]) for one in ranks}) == 1
