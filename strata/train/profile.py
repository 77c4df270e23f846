"""What chosen steps of a run did: a Chrome trace, a snapshot of the device's memory, and where the time went."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from strata.train.predict.step_kinds import StepKindTable, read_step_trace

STEP = "strata.step"
# Allocations and releases that a snapshot remembers, the latest.
_HISTORY = 200_000

VIEW_TRACE = "open {} in https://ui.perfetto.dev"
VIEW_MEMORY = (
    'python -c "import gzip, json; from torch.cuda._memory_viz import trace_plot; '
    "print(trace_plot(json.load(gzip.open('{}'))))\" > memory.html"
)
NO_MEMORY = "no memory snapshot: a CPU's allocator keeps no history"


class StepProfiler:
    """Traces the steps of a range into `folder`, on rank 0; all other steps, and all other ranks, run as they would.

    Make it before the model, so that the memory snapshot knows where each tensor came from. table: where the time went,
    once the range is done; None before, and if the run never came to it. notes: how to look at what was written.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        device: torch.device,
        *,
        rank: int = 0,
        floors: Mapping[str, float] | None = None,
    ) -> None:
        """steps: numbers of steps one after another. floors: the least seconds of a step by kind, to stand beside the
        measured (`StepTime.by_kind`). Raises ValueError for an empty range or one with gaps.
        """
        if not steps or steps.step != 1:
            raise ValueError(f"the steps to profile must be one after another, got {steps}; give first-last")
        self._folder, self._steps, self._device = folder, steps, device
        self._floors = floors or {}
        self._is_chosen = rank == 0
        self._remembers = self._is_chosen and device.type == "cuda"
        self._profile: profile | None = None
        self.table: StepKindTable | None = None
        self.notes: list[str] = []
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the work of a step of that number."""
        if not self._is_chosen or number not in self._steps or self.table is not None:
            yield
            return
        if self._profile is None:
            self._start()
        with record_function(STEP):
            yield
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, if the run ends within the range."""
        if self._profile is None:
            return
        self._synchronize()
        self._profile.stop()
        trace = self._folder / "trace.json.gz"
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        self.notes.append(VIEW_TRACE.format(trace))
        with gzip.open(trace) as stream:
            self.table = read_step_trace(json.load(stream)["traceEvents"], STEP, self._floors)
        self._write_memory()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._synchronize()  # nothing of the step before is left to run
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write_memory(self) -> None:
        if not self._remembers:
            self.notes.append(NO_MEMORY)
            return
        target = self._folder / "memory.json.gz"
        write_snapshot(torch.cuda.memory._snapshot(), target)
        torch.cuda.memory._record_memory_history(enabled=None)
        self.notes.append(VIEW_MEMORY.format(target))


def write_snapshot(snapshot: Mapping[str, object], target: Path) -> None:
    """What `torch.cuda.memory._snapshot` returns as gzipped JSON; torch's own file is a pickle, which runs code."""
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=1) as stream:
        stream.write(json.dumps(snapshot, default=str))  # in one piece: written bit by bit it takes a minute
