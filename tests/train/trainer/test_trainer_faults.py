"""Runs in which something goes wrong: bad gradients, poisoned samples, full disks, damaged checkpoints."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strata.comm.launch import World
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.folder import checkpoints, read_state
from strata.train.checkpoints.state import StateShard
from strata.train.config import TrainConfig
from strata.train.data.loader import DataPosition
from strata.train.data.pack import PackedBatch
from strata.train.finish import save_model
from strata.train.optimizer.config import learning_rate
from strata.train.settings import deterministic
from strata.train.steps.make import fresh, make_step
from strata.train.steps.result import StepResult
from strata.train.trainer import Trainer, TrainingStopped
from tests.train.conftest import FRESH, Small, Tune, cut_off, log
from tests.train.samples import ALONE, SHARE


class Wrapped:
    """The stepper of a run, with something around its steps."""

    def __init__(self, run: Trainer, around: Callable[[Any, Sequence[PackedBatch], float], StepResult]) -> None:
        self._inner, self._around = run.stepper, around
        run.stepper = self  # type: ignore[assignment]

    def __call__(self, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        return self._around(self._inner, batches, rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def breaks(run: Trainer, steps: set[int]) -> None:
    """Let a norm's weight be infinite during these steps, and see that they change nothing."""
    number = 0

    def around(inner: Any, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        nonlocal number
        number += 1
        if number not in steps:
            return inner(batches, rate)
        pieces: list[StateShard] = inner.state_shards()
        norm = next(one.tensor for one in pieces if (one.kind, one.name) == ("master", "model.norm.weight"))
        kept, before = norm.clone(), [one.tensor.clone() for one in pieces]
        run.checkpoints.before_update()
        norm.fill_(float("inf"))
        result = inner(batches, rate)
        norm.copy_(kept)
        assert all(torch.equal(one.tensor, was) for one, was in zip(inner.state_shards(), before, strict=True))
        return result

    Wrapped(run, around)


def test_steps_that_are_not_finite_are_skipped(small: Small, tmp_path: Path) -> None:
    warnings: list[str] = []
    run = Trainer(small(), ALONE, warn=warnings.append)
    breaks(run, {2, 5})
    run.train()
    lines = {line["step"]: line for line in log(tmp_path / "run")}
    assert list(lines) == [1, 2, 3, 4, 5, 6]
    assert [step for step, line in lines.items() if "loss" not in line] == [2, 5]
    assert [line.get("skipped") for line in lines.values()] == [None, 1, None, None, 1, None]
    assert [warning.split(":")[0] for warning in warnings] == ["step 2", "step 5"]
    assert all(warning.endswith("not finite; skipped (1 in a row, at most 5)") for warning in warnings)


def test_too_many_skipped_steps_stop_the_run(small: Small, tmp_path: Path) -> None:
    run = Trainer(small(faults={"max_skipped": 1}), ALONE)
    breaks(run, {4, 5})
    with pytest.raises(TrainingStopped, match=r"steps 4 to 5 .* more in a row than faults\.max_skipped = 1; lower"):
        run.train()
    # What was under way when the run was stopped is whole.
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000003"]
    resumed = Trainer(small(faults={"max_skipped": 1}), ALONE, resume=True)
    assert resumed.train().step == 6
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_run_may_stop_at_the_first_that_is_not_finite(small: Small, tmp_path: Path) -> None:
    run = Trainer(small(faults={"non_finite": "stop"}), ALONE)
    breaks(run, {1})
    with pytest.raises(TrainingStopped, match=r"step 1: loss nan, gradient norm nan: not finite"):
        run.train()
    assert not checkpoints(tmp_path / "run/checkpoints")
    assert not (tmp_path / "run/log.jsonl").exists()


POISONED = 41, 42
"""Steps of the data whose samples do harm, when the text is learned."""
GUARD = {"spike_window": 8, "spike_sigma": 6.0, "max_spikes": 1}


@pytest.fixture
def guarded(tune: Tune) -> Callable[..., TrainConfig]:
    """50 steps on a text that is soon learned, with a checkpoint every so many."""

    def made(every: int = 10, **faults: Any) -> TrainConfig:
        run = {"steps": 50, "log_every": 5, "checkpoint_every": every}
        data = {"tokens_per_pack": 200, "window": 16}
        return tune("text", run=run, data=data, faults=GUARD | faults, **FRESH)

    return made


def poison(run: Trainer) -> list[int]:
    """Let the model be asked for other tokens wherever samples of the steps in `POISONED` stand. Returns a list that
    grows whenever one of these is trained on.
    """
    place, harmful = DataPosition(), set()
    for number in range(1, max(POISONED) + 1):
        step = run.loader.step(place)
        if number in POISONED:
            harmful |= positions(step.batches)
        place = step.next
    met: list[int] = []

    def around(inner: Any, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        if positions(batches) & harmful:
            met.append(len(met))
            batches = [replace(one, targets=4095 - one.targets) for one in batches]
        return inner(batches, rate)

    Wrapped(run, around)
    return met


def positions(batches: Sequence[PackedBatch]) -> set[int]:
    return {position for batch in batches for position in batch.samples.positions.tolist()}


def plain_run(config: TrainConfig, run: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last state of a loop over the steps of the data but the poisoned ones."""
    step = make_step(run.start.config, run.layout, run.mesh, config.optimizer, fresh(config.run.seed))
    losses, place = [], DataPosition()
    for number in range(1, 50 + len(POISONED) + 1):
        data = run.loader.step(place)
        place = data.next
        if number not in POISONED:
            rate = learning_rate(len(losses), peak=1e-2, steps=50, warmup=1, decay=1)
            losses.append(float(step(data.batches, rate).loss))
    return losses, {f"{one.kind}/{one.name}": one.tensor for one in step.state_shards()}


def assert_as_plain(config: TrainConfig, run: Trainer) -> None:
    """The run has ended, bit for bit, as one that has never seen the poisoned samples, and so does its log read."""
    folder = Path(config.run.out)
    with deterministic(True):
        losses, state = plain_run(config, run)
    lines = log(folder)
    assert [line["step"] for line in lines] == list(range(5, 51, 5))
    means = [sum(losses[first : first + 5]) / 5 for first in range(0, 50, 5)]
    assert [line["loss"] for line in lines] == pytest.approx(means, rel=1e-6)
    stored = load_file(folder / "checkpoints/step-00000050" / SHARE)
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in state)


def test_a_spike_is_rolled_back_and_its_samples_left_out(guarded: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config, warnings = guarded(spike="rollback"), []
    run = Trainer(config, ALONE, warn=warnings.append)
    met = poison(run)
    position = run.train()
    spike, back = warnings
    assert len(met) == 2
    assert spike.startswith("step 41: loss ")
    assert back.endswith("as have all since step 41; back to before it, and on without the samples of steps 41 to 42")
    assert (position.step, position.data_step) == (50, 52)
    assert_as_plain(config, run)
    state = read_state(tmp_path / "run/checkpoints/step-00000050")
    assert state["guard"]["left_out"] == [[41, 42]]
    # Tokens that were trained on: without what was left out.
    assert position.tokens == log(tmp_path / "run")[-1]["tokens"] == state["position"]["tokens"]


def test_a_run_that_went_back_resumes_without_the_samples(guarded: Callable[..., TrainConfig]) -> None:
    """Both from a checkpoint that was made after going back, and from one before, which knows of nothing."""
    for every, met_again in ((5, 0), (10, 2)):
        config = guarded(every, spike="rollback")
        run = Trainer(config, ALONE)
        met = poison(run)
        cut_off(run, 50 if every == 5 else 40 + 5)
        assert len(met) == 2
        resumed = Trainer(config, ALONE, resume=True)
        assert resumed.position.step == (45 if every == 5 else 40)
        met = poison(resumed)
        resumed.train()
        assert len(met) == met_again
        assert_as_plain(config, resumed)
        shutil.rmtree(config.run.out)


def test_without_a_checkpoint_before_the_spike_a_run_stops(guarded: Callable[..., TrainConfig], tmp_path: Path) -> None:
    run = Trainer(guarded(every=50, spike="rollback"), ALONE)
    poison(run)
    with pytest.raises(TrainingStopped, match="has no checkpoint to go back to; save more often, or begin again"):
        run.train()
    assert not checkpoints(tmp_path / "run/checkpoints")


def test_a_spike_is_reported_unless_asked_otherwise(guarded: Callable[..., TrainConfig], tmp_path: Path) -> None:
    warnings: list[str] = []
    run = Trainer(guarded(every=50), ALONE, warn=warnings.append)
    met = poison(run)
    assert run.train().data_step == 50
    assert len(met) == 2
    assert {"step 41", "step 42"} <= {warning.split(":")[0] for warning in warnings}
    assert all("spikes above" in warning for warning in warnings)
    shutil.rmtree(tmp_path / "run")
    warnings.clear()
    run = Trainer(guarded(every=50, spike="ignore"), ALONE, warn=warnings.append)
    poison(run)
    assert run.train().data_step == 50
    assert not warnings


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As a full disk: what is longer cannot be written."""
    before, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    _limit_files(size)
    try:
        yield
    finally:
        _limit_files(before)


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_checkpoint_that_cannot_be_written_leaves_the_run_going(small: Small, tmp_path: Path) -> None:
    warnings: list[str] = []
    run = Trainer(small(run={"steps": 9}), ALONE, warn=warnings.append)
    with files_of_at_most(50_000):

        def report(line: dict[str, Any]) -> None:
            if line["step"] == 7:
                run.checkpoints.finish()
                _limit_files(resource.RLIM_INFINITY)

        run.train(report)
    assert [warning.split(" (")[0] for warning in warnings] == [
        "the checkpoint of step 3 was not written",
        "the checkpoint of step 6 was not written",
    ]
    assert all("File too large" in warning for warning in warnings)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000009"]
    assert [line["step"] for line in log(tmp_path / "run")] == list(range(1, 10))
    save_model(run)


def test_a_model_is_not_made_of_an_older_checkpoint(small: Small, tmp_path: Path) -> None:
    warnings: list[str] = []
    run = Trainer(small(), ALONE, warn=warnings.append)

    def fill(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            run.checkpoints.finish()
            _limit_files(50_000)

    with files_of_at_most(resource.RLIM_INFINITY):
        assert run.train(fill).step == 6
    assert len(warnings) == 1
    with pytest.raises(ValueError, match=r"the checkpoint of step 6 was not written, .*; make room and resume the run"):
        save_model(run)
    assert not (tmp_path / "run/model").exists()
    resumed = Trainer(small(), ALONE, resume=True)
    assert resumed.position.step == 3
    resumed.train()
    save_model(resumed)


def test_half_written_and_corrupt_checkpoints(small: Small, tmp_path: Path) -> None:
    Trainer(small(), ALONE).train()
    folder = tmp_path / "run/checkpoints"
    whole = (folder / "step-00000006" / SHARE).read_bytes()
    # What a crash while writing leaves behind is no checkpoint.
    (folder / ".step-00000009.part").mkdir()
    assert Trainer(small(), ALONE, resume=True).position.step == 6
    assert not (folder / ".step-00000009.part").exists()
    (folder / "step-00000006" / SHARE).write_bytes(b"\x10")
    warnings: list[str] = []
    run = Trainer(small(), ALONE, resume=True, warn=warnings.append)
    assert run.position.step == 3
    assert "step-00000006 is corrupt: rank-00000.safetensors: it has 1 bytes" in warnings[0]
    assert warnings[0].endswith("; goes on from the one before, step-00000003")
    run.train()
    assert (folder / "step-00000006" / SHARE).read_bytes() == whole
    for path in checkpoints(folder):
        (path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"all 2 checkpoints in .* are corrupt; remove them to begin again"):
        Trainer(small(), ALONE, resume=True)


def test_a_slow_disk_is_no_hang(tmp_path: Path) -> None:
    """While the end of a run waits for its checkpoint, it says again and again that it is still there."""
    told: list[float] = []
    world = World(0, 0, 1, torch.device("cpu"), None)
    writer = Checkpointer(tmp_path, world, keep=1, warn=pytest.fail, waits=lambda: told.append(time.monotonic()))
    tensor = torch.zeros(8_000_000)
    piece = StateShard("master", "weight", (tensor.numel(),), ((0, tensor.numel()),), 0, tensor)
    writer.start(1, {"recipe": {}}, [piece])
    assert writer.finish() is not None
    assert told
