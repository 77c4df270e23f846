"""Finds the ranks that compute more slowly than the others, which all then wait for in every step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from strata.train.faults.config import FaultsConfig


class ComputeClock:
    """The time that this rank spends computing in each step: between `begin` and `end`, which stand around work that
    waits for no other rank. On a GPU by events in its stream, so the host waits for nothing.

    Where ranks wait for each other within a layer (tensor, context and pipeline parallel), these look alike, and it is
    their group that is compared with others. What is captured, and so runs later, is not timed: the host cannot ask for
    an event in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begun: torch.cuda.Event | float | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event] | float] = []

    def begin(self) -> None:
        if not self._is_cuda:
            self._begun = time.perf_counter()
        else:
            self._begun = None if torch.cuda.is_current_stream_capturing() else _event()

    def end(self) -> None:
        if self._begun is None:
            return
        if isinstance(self._begun, float):
            self._spans.append(time.perf_counter() - self._begun)
        else:
            self._spans.append((self._begun, _event()))

    def take(self) -> list[float]:
        """Seconds of each step since the last call. Waits for a GPU to have finished them."""
        spans, self._spans = self._spans, []
        return [span if isinstance(span, float) else _seconds(*span) for span in spans]


@dataclass(frozen=True)
class Slowest:
    """Of one interval of the log. share: what the slowest rank takes longer than the middle one, of the whole step's
    time: what the run would gain without it. line: about ranks that were too slow in several intervals in a row, for a
    person; "" if there are none.
    """

    rank: int
    share: float
    line: str


class Stragglers:
    """Compares the ranks once an interval of the log. All ranks judge alike."""

    def __init__(self, config: FaultsConfig, ranks: int) -> None:
        self._config, self._slow_for = config, [0] * ranks

    def judge(self, seconds: Sequence[float], step_seconds: float) -> Slowest:
        """seconds: of computing in a step of this interval, of each rank. step_seconds: of a whole one, with its
        waiting.
        """
        middle, slowest = median(seconds), max(range(len(seconds)), key=lambda rank: seconds[rank])
        limit = middle * (1 + self._config.straggler_share)
        self._slow_for = [count + 1 if one > limit else 0 for count, one in zip(self._slow_for, seconds, strict=True)]
        wanted = self._config.straggler_intervals
        slow = [rank for rank, count in enumerate(self._slow_for) if count >= wanted]
        share = (seconds[slowest] - middle) / step_seconds
        shown = ", ".join(
            f"rank {rank} {seconds[rank] * 1e3:.1f} ms (+{seconds[rank] / middle - 1:.0%})" for rank in slow
        )
        line = f"slower than the median of {middle * 1e3:.1f} ms a step for {wanted} intervals: {shown}" if slow else ""
        return Slowest(slowest, share, line)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3
