"""What a run measures of itself between two lines of its log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean, median_high
from typing import Any

import torch

from strata.comm.collectives import all_gather_json
from strata.comm.mesh import Axis
from strata.train.data.loader import LoadedStep, Position
from strata.train.faults.config import FaultsConfig
from strata.train.faults.stragglers import ComputeClock, Stragglers
from strata.train.predict.flops import StepFlops
from strata.train.steps.result import Reading

GIB = 2**30


@dataclass
class _Interval:
    """Since the line before. flops: of this rank's packs."""

    tokens: int
    started: float
    steps: int = 0
    flops: int = 0
    filled: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    skipped: int = 0


class Meter:
    """Counts the steps of this rank. Time spent outside of steps (`restart`) does not count as training."""

    def __init__(
        self,
        faults: FaultsConfig,
        world_axis: Axis,
        replicas: int,
        device: torch.device,
        clock: ComputeClock,
        peak_flops: float | None = None,
    ) -> None:
        """world_axis: all ranks. replicas: how many of them see documents of their own; the others repeat those. clock:
        of what each rank computes. peak_flops: of one device.
        """
        self._world_axis, self._replicas, self._device = world_axis, replicas, device
        self._clock, self._peak = clock, peak_flops
        self._stragglers = Stragglers(faults, world_axis.size)
        self._began = time.perf_counter()
        self._interval = _Interval(0, self._began)

    def restart(self, tokens: int) -> None:
        """Begin an interval. tokens: trained on so far."""
        self._interval = _Interval(tokens, time.perf_counter())

    def count(self, step: LoadedStep, flops: StepFlops) -> None:
        """A step was launched. flops: of this rank's packs."""
        self._interval.steps += 1
        self._interval.filled.append(step.utilisation)
        self._interval.flops += flops.total

    def read(self, reading: Reading, *, is_skipped: bool) -> None:
        """A step's numbers have arrived."""
        if is_skipped:
            self._interval.skipped += 1
        else:
            self._interval.readings.append(reading)

    def line(self, position: Position, rate: float) -> tuple[dict[str, Any], str]:
        """The line of the log for the interval, which ends here, and a line about slow ranks, "" if there is none.

        loss and what else steps say of themselves: the mean over the steps. gradient_norm: of the last. All ranks call
        this at the same step, with all its numbers read.
        """
        interval, now = self._interval, time.perf_counter()
        elapsed = now - interval.started
        values: dict[str, Any] = {"step": position.step}
        if interval.readings:
            last = interval.readings[-1]
            values["loss"] = fmean(one.loss for one in interval.readings)
            values["gradient_norm"] = last.norm
            for name in last.metrics:
                values[name] = fmean(one.metrics[name] for one in interval.readings)
        values |= {"learning_rate": rate, "tokens": position.tokens}
        values["utilisation"] = round(fmean(interval.filled), 4)
        values["tokens_per_second"] = round((position.tokens - interval.tokens) / elapsed)
        if interval.skipped:
            values["skipped"] = interval.skipped
        seconds = self._clock.take()
        found = all_gather_json(
            {"flops": interval.flops, "computes": median_high(seconds) if seconds else 0.0},
            self._world_axis,
            torch.device("cpu"),
        )
        if self._peak is not None:
            flops = sum(one["flops"] for one in found) * self._replicas / self._world_axis.size
            values["mfu"] = round(flops / elapsed / (self._peak * self._world_axis.size), 4)
        line = ""
        if self._world_axis.size > 1 and all(one["computes"] for one in found):
            slowest = self._stragglers.judge([one["computes"] for one in found], elapsed / interval.steps)
            values |= {"slowest_rank": slowest.rank, "slowest_share": round(slowest.share, 4)}
            line = slowest.line
        if self._device.type == "cuda":
            values["memory_gib"] = round(torch.cuda.max_memory_allocated(self._device) / GIB, 2)
        values["seconds"] = round(now - self._began, 2)
        self.restart(position.tokens)
        return values, line
