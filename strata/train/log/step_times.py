"""Where the time between two lines of the log went, for those who explain a run later: `times.jsonl` beside the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from strata.models.config import ModelConfig
from strata.train.data.loader import LoadedStep
from strata.train.faults.stragglers import ComputeClock
from strata.train.log.json_lines import JsonLines
from strata.train.log.logs import Logs
from strata.train.predict.flops import StepFlops, batch_flops

TIMES = "times.jsonl"
# The phase in which a profiler begins or writes its trace: no other run has it.
PROFILE = "profile"
# Forward passes over what is not trained on, which are no part of a step either.
VALIDATION = "validation"
# Of the host before the first phase of a step.
_BETWEEN = "between"


class TrainingStepTimes:
    """Of a rank: the host's time by phase, which is all of it; how long the device had the steps' work, which
    begins and ends in its stream; and the arithmetic that the documents called for, of all ranks.
    """

    def __init__(
        self, config: ModelConfig, replicas: int, device: torch.device, *, weights_are_frozen: bool = False
    ) -> None:
        """replicas: ranks that see documents of their own. weights_are_frozen: see `document_flops`."""
        self._config, self._replicas, self._frozen = config, replicas, weights_are_frozen
        self._work = ComputeClock(device)
        self.restart()

    def restart(self) -> None:
        """Begin an interval; what was counted of the one before is dropped."""
        self._work.take()
        self._began = self._since = time.perf_counter()
        self._phase = _BETWEEN
        self._phases: Counter[str] = Counter()
        self._counts = dict.fromkeys(("steps", "tokens", "sequences", "packs"), 0)
        self._flops = StepFlops()

    def at(self, phase: str) -> None:
        """The host begins a phase, which ends the one before."""
        now = time.perf_counter()
        self._phases[self._phase] += now - self._since  # type: ignore[assignment]
        self._phase, self._since = phase, now

    def begin(self) -> None:
        """The work of a step follows in the device's stream."""
        self._work.begin()

    def end(self, step: LoadedStep) -> StepFlops:
        """All work of the step is in the stream. Returns the arithmetic of this rank's packs."""
        self._work.end()
        sequences = sum(len(one.lengths) for one in step.batches)
        counts = (1, step.tokens, sequences * self._replicas, len(step.batches) * self._replicas)
        for name, count in zip(self._counts, counts, strict=True):
            self._counts[name] += count
        flops = batch_flops(self._config, step.batches, weights_are_frozen=self._frozen)
        self._flops += flops
        return flops

    def take(self) -> dict[str, Any]:
        """The interval, which ends here: the next one begins. Waits for a GPU to have finished its steps.

        seconds: of the interval, which the host's phases add up to. device: from the first to the last work of each
        step. products, attention, head: FLOPs, see `StepFlops`.
        """
        phase = self._phase
        self.at(phase)
        values = {
            **self._counts,
            "seconds": round(self._since - self._began, 6),
            "device": round(sum(self._work.take()), 6),
            "phases": {name: round(seconds, 6) for name, seconds in self._phases.items() if seconds >= 1e-6},
            **{name: flops * self._replicas for name, flops in vars(self._flops).items()},
        }
        now = self._since
        self.restart()
        self._began = self._since = now
        self._phase = phase
        return values


def open_times(folder: Path, step: int, *, rank: int, warn: Callable[[str], None]) -> Logs:
    """The times of the run in `folder`, of which `step` steps are done; ranks other than 0 write nothing."""
    return Logs((), warn) if rank else Logs([JsonLines(folder / TIMES, step)], warn)
