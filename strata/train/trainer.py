"""A training run on one rank, from its config to the last checkpoint: the same loop for one process and for many."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from strata.comm.launch import World
from strata.hardware.machine import cpu_name
from strata.parallel.data_parallel import all_ranks
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.folder import NEEDED
from strata.train.config import TrainConfig
from strata.train.data.loader import LoadedStep, Position, prefetch
from strata.train.faults.guard import LossGuard, StepVerdict, VerdictKind
from strata.train.faults.hang import HangWatch
from strata.train.faults.stragglers import ComputeClock
from strata.train.layout import chosen_layout
from strata.train.log.description import RunDescription
from strata.train.log.logs import Logs, open_logs
from strata.train.log.step_times import PROFILE, TrainingStepTimes, open_times
from strata.train.meter import Meter
from strata.train.optimizer.config import learning_rate
from strata.train.phases import ObservedPhases
from strata.train.profile import StepProfiler
from strata.train.settings import collected_between_steps, deterministic, sole_run
from strata.train.start import (
    lasting,
    open_data,
    recipe_of,
    resumed,
    starting_point,
    training_loader,
    validation_loader,
)
from strata.train.stepper import chosen_recompute, make_stepper
from strata.train.steps.result import Reading, Results
from strata.train.validation import Validation

Report = Callable[[dict[str, Any]], None]


class TrainingStopped(ValueError):
    """The policy for faults ends the run; what was saved before is good."""


class _RollBack(Exception):
    def __init__(self, verdict: StepVerdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class Trainer:
    """The parts of one run on this rank, ready to step. Made fresh, or as the newest checkpoint left them.

    All ranks make one with the same config and call it alike.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        *,
        resume: bool = False,
        peak_flops: float | None = None,
        warn: Callable[[str], None] = lambda _: None,
        profiler: StepProfiler | None = None,
    ) -> None:
        """resume: go on from the newest checkpoint, if there is one. peak_flops: the device's dense peak, FLOP/s, for
        MFU. warn: receives lines for people. profiler: traces its steps.

        Raises ValueError, before anything is trained, for what does not go together.
        """
        self.config, self.warn, self._profiler = config, warn, profiler
        self.folder = Path(config.run.out)
        is_resumed = resumed(self.folder, wanted=resume)
        if resume and not is_resumed:
            warn(f"nothing to resume in {self.folder}: begins at step 1")
        data = open_data(config, warn)
        self.start = starting_point(config, data.every)
        self.layout = chosen_layout(config, self.start.config, world, warn)
        self._watch = HangWatch(world, self.folder / "faults", config.faults.hang_seconds)
        self.world = self._watch.world
        self.mesh = self.layout.mesh(self.world)
        documents = self.mesh.flattened("dp", "shard")
        self.loader = training_loader(config, data, rank=documents.index, ranks=documents.size)
        self._recipe = recipe_of(config, data.training, self.world.device.type)
        config = self.config = lasting(config, self.loader)
        assert config.run.steps is not None
        self.steps = config.run.steps
        held_out = validation_loader(config, data, rank=documents.index, ranks=documents.size)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._sole_run():
            pass  # before anything of another run is touched
        self.checkpoints = Checkpointer(
            self.folder / "checkpoints",
            self.world,
            keep=config.run.keep_checkpoints,
            warn=warn,
            waits=lambda: self._watch.at(self.position.step, "checkpoint"),  # a slow disk is no hang
        )
        clock, device, frozen = ComputeClock(self.world.device), self.world.device, config.lora is not None
        self._times = TrainingStepTimes(self.start.config, documents.size, device, weights_are_frozen=frozen)
        self._phases = ObservedPhases(self._watch, clock, self._times)
        self._validation = None
        if config.validation is not None and held_out is not None:
            self._validation = Validation(config.validation, held_out, self._phases)
        recompute = chosen_recompute(config, self.start.config, self.layout, device)
        # DPO computes its reference here.
        with deterministic(config.run.deterministic):
            self.stepper = make_stepper(
                config,
                self.start,
                data,
                self.layout,
                self.mesh,
                recompute,
                self._phases,
                self.checkpoints.before_update,
                warn,
            )
        self._meter = Meter(config.faults, all_ranks(self.mesh), documents.size, device, clock, peak_flops)
        if config.balance is not None and (about_bias := config.balance.warning(self.start.config)):
            warn(about_bias)
        self._guard = LossGuard(config.faults)
        self._results = Results(self.world.device)
        self.position = Position()
        if is_resumed:
            self._guard.restore(self._load()["guard"])
        self._describe(recompute)

    def train(self, report: Report = lambda _: None) -> Position:
        """All steps that are left, or until validation ends them, and a checkpoint of the last. `report` receives each
        line of the log, on every rank. Then the run stands, with its weights, where that checkpoint or the best one is;
        the result says where.

        Raises TrainingStopped where the policy for faults says so.
        """
        with contextlib.ExitStack() as held:
            held.enter_context(self._sole_run())
            held.enter_context(self._watch)
            held.callback(self._phases.close)
            held.enter_context(deterministic(self.config.run.deterministic))
            held.enter_context(collected_between_steps())
            self.checkpoints.prepare(self.stepper.state_shards())
            while not self.is_over:
                try:
                    # Which drop the lines of steps that are repeated.
                    step, rank = self.position.step, self.world.rank
                    logs = open_logs(self.folder, self.config.log, step, asdict(self.config), rank=rank, warn=self.warn)
                    with logs as log, open_times(self.folder, step, rank=rank, warn=self.warn) as times:
                        self._advance(log, times, report)
                except _RollBack as back:
                    self.warn(back.verdict.reason)
                    self._go_back(back.verdict)
            self.checkpoints.finish()
            self._go_to_best()
        return self.position

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.position.step >= self.steps or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether validation has ended the run."""
        return self._validation is not None and self._validation.stops

    def _advance(self, log: Logs, times: Logs, report: Report) -> None:
        """Steps until the end."""
        run = self.config.run
        self._meter.restart(self.position.tokens)
        self._times.restart()
        last = self._guard.data_step(self.steps)
        with prefetch(self.loader, self.position.place, last - self.position.data_step) as steps:
            while not self.is_over:
                with self._traced(self.position.step + 1):
                    self._one_step(self._next(steps))
                    if self._profiler is not None:
                        self._phases.at(PROFILE)  # a trace that ends here is written
                is_saved, is_measured = self._is_due(run.checkpoint_every), self._is_measured()
                # A checkpoint has seen all numbers, and no line spans the point where a run may resume.
                is_logged = is_saved or is_measured or self._is_due(run.log_every)
                self._phases.at("log")
                # The device computes while the numbers of the step before are looked at.
                for reading in self._results.ready(behind=0 if is_logged else 1):
                    self._judge(reading)
                if is_logged:
                    self._write_line(log, report, is_measured=is_measured)
                    times.write(self.position.step, self._times.take())
                self._phases.at("checkpoint")
                self.checkpoints.poll()
                if is_saved or self.is_stopped or self._best_step == self.position.step:
                    self.checkpoints.start(self.position.step, self._state(), self.stepper.state_shards())
                    gc.collect()
                if is_saved or is_measured:
                    self._meter.restart(self.position.tokens)
        if self._validation is not None and self._validation.stops and self.position.step < self.steps:
            self.warn(self._validation.verdict())

    def _state(self) -> dict[str, Any]:
        """For a checkpoint of the step that was just done."""
        state: dict[str, Any] = {"position": asdict(self.position), "guard": self._guard.state()}
        state["recipe"] = self._recipe
        if self._validation is not None:
            state["validation"] = self._validation.state()
        if self._best_step is not None:
            state[NEEDED] = [self._best_step]
        return state

    def _is_due(self, every: int) -> bool:
        """What happens after every so many steps, and after the last."""
        return self.position.step == self.steps or self.position.step % every == 0

    def _is_measured(self) -> bool:
        """Whether validation follows this step."""
        return self.config.validation is not None and self._is_due(self.config.validation.every)

    @property
    def _best_step(self) -> int | None:
        return None if self._validation is None else self._validation.best_step

    def _traced(self, number: int) -> AbstractContextManager[None]:
        self._phases.step(number)
        if self._profiler is None:
            return contextlib.nullcontext()
        self._phases.at(PROFILE)
        return self._profiler.step(number)

    def _write_line(self, log: Logs, report: Report, *, is_measured: bool) -> None:
        values, about_ranks = self._meter.line(self.position, self._rate(self.position.step - 1))
        values["checkpoint_stall"] = round(self.checkpoints.stalled_seconds, 3)
        if about_ranks:
            self.warn(about_ranks)
        if is_measured and self._validation is not None:
            values |= self._validation.measure(self.stepper, self.position.step)
            self._phases.at("log")
        log.write(self.position.step, values)
        report(values)

    def _next(self, steps: Iterator[LoadedStep]) -> LoadedStep:
        """The samples of the next step, past those that are left out."""
        self._phases.at("data")
        wanted = self._guard.data_step(self.position.step + 1)
        while True:
            step = next(steps)
            if self.position.data_step + 1 == wanted:
                return step
            self.position = self.position.without(step)

    def _one_step(self, step: LoadedStep) -> None:
        self._times.begin()
        result = self.stepper(step.batches, self._rate(self.position.step))
        flops = self._times.end(step)
        self.position = self.position.after(step)
        self._results.add(self.position.step, result)
        self._meter.count(step, flops)

    def _rate(self, step: int) -> float:
        peak = self.config.optimizer.learning_rate
        return learning_rate(step, peak=peak, steps=self.steps, **asdict(self.config.schedule))

    def _judge(self, reading: Reading) -> None:
        """Raises what follows from a step's numbers, on all ranks alike, as they see the same."""
        verdict = self._guard.observe(reading.step, reading.loss, reading.norm)
        if verdict.kind is VerdictKind.STOP:
            self.checkpoints.finish()  # one of an earlier step may be under way
            raise TrainingStopped(verdict.reason)
        if verdict.kind is VerdictKind.ROLLBACK:
            raise _RollBack(verdict)
        if verdict.kind is not VerdictKind.OK:
            self.warn(verdict.reason)
        self._meter.read(reading, is_skipped=verdict.kind is VerdictKind.SKIPPED)

    def _go_back(self, verdict: StepVerdict) -> None:
        self._results.discard()
        self.checkpoints.finish()
        state = self._load(before=verdict.before)
        self._guard.roll_back(state["guard"])

    def _go_to_best(self) -> None:
        """Take the weights of the step whose validation loss was the lowest, if the finished model is that."""
        best, shards = self._best_step, self.stepper.state_shards()
        if self._validation is None or best in (None, self.position.step):
            return
        state = self.checkpoints.restore(shards, self._recipe, at=best)
        if state is None:
            self.warn(f"step {best} had the lowest validation loss and has no checkpoint: the model is of the last one")
            self._load()
            return
        self._take(state)
        lowest = self._validation.progress.lowest
        self.warn(f"the model is of step {best}, whose validation loss, {lowest:.4f}, was the lowest")

    def _load(self, *, before: int | None = None) -> dict[str, Any]:
        """Continue from the newest checkpoint, of a step less than `before`. Returns the state that was saved in it."""
        state = self.checkpoints.restore(self.stepper.state_shards(), self._recipe, before=before)
        if state is None:
            raise TrainingStopped(f"{self.folder} has no checkpoint to go back to; save more often, or begin again")
        self._take(state)
        if self._validation is not None and not self._validation.restore(state.get("validation")):
            self.warn("the validation data is not what it was: the lowest loss, and patience, begin anew")
        return state

    def _take(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was made that the shards were filled from."""
        self.position = msgspec.convert(state["position"], Position)
        self.stepper.restored(self.position.step)

    def _describe(self, recompute: str) -> None:
        """For those who explain the run later."""
        if not self.world.is_main:
            return
        kind = self.world.device.type
        device = torch.cuda.get_device_name(self.world.device) if kind == "cuda" else cpu_name()
        described = RunDescription(
            self.config, self.start.config, self.layout, recompute, device, kind, torch.get_num_threads()
        )
        try:
            described.write(self.folder)
        except OSError as error:
            self.warn(f"the run cannot be explained later: {error.filename}: {error.strerror}")

    def _sole_run(self) -> AbstractContextManager[None]:
        return sole_run(self.folder) if self.world.is_main else contextlib.nullcontext()
