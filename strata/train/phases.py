"""What a rank is doing within a step, for the hang watch, the trace and the compute clock."""

from __future__ import annotations

import torch

from strata.train.faults.hang import HangWatch
from strata.train.faults.stragglers import ComputeClock
from strata.train.log.step_times import TrainingStepTimes

# Forward and backward passes: the part of a step in which a rank need not wait for others.
PASSES = "passes"


class Phases:
    """Called when a phase begins, which ends the one before. Nothing observes these."""

    def at(self, phase: str) -> None:
        """phase: `PASSES` or another name, such as "data", "reduce", "update", "checkpoint"."""


NO_PHASES = Phases()


class ObservedPhases(Phases):
    """`Phases` that a hang watch, a profiler's trace, a clock and its times follow."""

    def __init__(self, watch: HangWatch, clock: ComputeClock, times: TrainingStepTimes) -> None:
        self._watch, self._clock, self._times = watch, clock, times
        self._step = 0
        self._phase = ""
        self._range: torch.profiler.record_function | None = None

    def step(self, number: int) -> None:
        """The phases from now on are those of this step."""
        self._step = number

    def at(self, phase: str) -> None:
        if self._phase == PASSES:
            self._clock.end()
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._watch.at(self._step, phase)
        self._times.at(phase)
        self._phase = phase
        self._range = torch.profiler.record_function(f"strata.{phase}")
        self._range.__enter__()
        if phase == PASSES:
            self._clock.begin()

    def close(self) -> None:
        """The last phase has ended."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
