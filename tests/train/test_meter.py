"""What a run knows of itself: readings that arrive late, the line of an interval by hand, how far the data is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
import torch

from strata.comm.launch import World
from strata.models.config import config_from_dict
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train import meter
from strata.train.data.encoding import Encoded
from strata.train.data.loader import DataPosition, LoadedStep, Position
from strata.train.data.pack import pack
from strata.train.faults.config import FaultsConfig
from strata.train.faults.stragglers import ComputeClock
from strata.train.log.step_times import TrainingStepTimes
from strata.train.meter import Meter
from strata.train.predict.flops import StepFlops
from strata.train.steps.result import Reading, Results, StepResult
from tests.train.conftest import SMALL

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU, None)


def result(loss: float, **metrics: float) -> StepResult:
    named = {name: torch.tensor(value) for name, value in metrics.items()}
    return StepResult(torch.tensor(loss, dtype=torch.float64), torch.tensor(2 * loss), named)


def test_readings_come_in_order_and_as_late_as_asked() -> None:
    results = Results(CPU)
    for step in (1, 2, 3):
        results.add(step, result(step / 2, margin=float(step), counted=7.0))
    assert [one.step for one in results.ready(behind=1)] == [1, 2]
    assert list(results.ready(behind=1)) == []
    results.add(4, result(2.0))
    assert list(results.ready(behind=0)) == [
        Reading(3, 1.5, 3.0, {"margin": 3.0, "counted": 7.0}),
        Reading(4, 2.0, 4.0, {}),
    ]
    results.add(5, result(1.0))
    results.discard()
    assert list(results.ready(behind=0)) == []


def test_a_position_counts_what_was_used_and_what_was_left_out() -> None:
    step = LoadedStep([], DataPosition(2, 1), 500, 0.9)
    first = Position().after(step)
    assert first == Position(step=1, data_step=1, place=DataPosition(2, 1), tokens=500)
    skipped = first.without(replace(step, next=DataPosition(3, 0)))
    assert skipped == Position(step=1, data_step=2, place=DataPosition(3, 0), tokens=500)
    assert msgspec.convert(json.loads(json.dumps(asdict(skipped))), Position) == skipped


class Time:
    """Seconds that a test decides."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(meter, "time", made)
    return made


def made(*, peak: float | None = None) -> Meter:
    return Meter(FaultsConfig(), all_ranks(Layout().mesh(ALONE)), 1, CPU, ComputeClock(CPU), peak)


def step_of(*lengths: int, utilisation: float) -> LoadedStep:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    wanted = np.ones(offsets[-1], np.bool_)
    wanted[offsets[:-1]] = False
    batch = pack(Encoded(np.zeros(offsets[-1], np.int32), wanted, offsets))
    return LoadedStep([batch], DataPosition(), int(offsets[-1]), utilisation)


def test_the_line_of_an_interval_by_hand(time: Time) -> None:
    watch = made()
    time.now += 50  # before the first step
    watch.restart(1000)
    for utilisation in (0.9, 0.6, 0.9):
        watch.count(step_of(30, 70, utilisation=utilisation), StepFlops())
    watch.read(Reading(1, 3.0, 1.0, {"margin": 0.5}), is_skipped=False)
    watch.read(Reading(2, float("nan"), float("inf"), {"margin": float("nan")}), is_skipped=True)
    watch.read(Reading(3, 1.0, 2.0, {"margin": 1.5}), is_skipped=False)
    time.now += 2
    line, about_ranks = watch.line(Position(step=3, tokens=1300), 1e-3)
    assert line == {
        "step": 3,
        "loss": 2.0,
        "gradient_norm": 2.0,
        "margin": 1.0,
        "learning_rate": 1e-3,
        "tokens": 1300,
        "utilisation": 0.8,
        "tokens_per_second": 150,
        "skipped": 1,
        "seconds": 52.0,
    }
    assert about_ranks == ""
    # The next interval knows nothing of it.
    watch.count(step_of(10, utilisation=0.5), StepFlops())
    watch.read(Reading(4, 0.5, 0.1, {}), is_skipped=False)
    time.now += 0.1
    line, _ = watch.line(Position(step=4, tokens=1310), 1e-3)
    assert (line["loss"], line["tokens_per_second"], line["utilisation"]) == (0.5, 100, 0.5)
    assert not {"skipped", "margin"} & line.keys()


def test_a_line_of_skipped_steps_alone_has_no_loss(time: Time) -> None:
    watch = made()
    watch.count(step_of(10, utilisation=1.0), StepFlops())
    watch.read(Reading(1, float("nan"), float("nan"), {}), is_skipped=True)
    time.now += 1
    line, _ = watch.line(Position(step=1, tokens=10), 1e-3)
    assert not {"loss", "gradient_norm"} & line.keys()
    assert line["skipped"] == 1


def test_mfu_is_the_work_of_the_documents_by_the_peak(time: Time) -> None:
    """Products of 4 kinds a layer, attention of every token with those before it, the head where it counts."""
    config = config_from_dict(SMALL["model"] | {"vocab_size": 600}, "model")
    matrices = 2 * (32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48)
    forward = 2 * 100 * matrices + 2 * 98 * 32 * 600
    pairs = sum(length * (length + 1) // 2 for length in (30, 70))
    attention = 2 * 2 * 2 * 4 * 8 * pairs
    for frozen, factor in ((False, 3), (True, 2)):
        watch, times = made(peak=1e9), TrainingStepTimes(config, 1, CPU, weights_are_frozen=frozen)
        for _ in range(2):
            step = step_of(30, 70, utilisation=1.0)
            watch.count(step, times.end(step))
        time.now += 0.5
        line, _ = watch.line(Position(step=2, tokens=200), 1e-3)
        wanted = 2 * (factor * forward + 3 * attention) / 0.5 / 1e9
        assert line["mfu"] == pytest.approx(wanted, abs=1e-4), frozen
