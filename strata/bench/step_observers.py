"""What a CUDA device does while a test runs: when each step begins and ends, and every kernel of a traced call."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from strata.bench.result import HostGap
from strata.bench.run import call
from strata.bench.trace import DeviceInterval, TraceTime, read_trace

if TYPE_CHECKING:
    from strata.bench.workloads import InferenceTest
    from strata.engine.llm import LLM
    from strata.engine.loop import EngineLoop, StepObserver
    from strata.engine.plan import StepPlan


@dataclass(frozen=True)
class CallTimes:
    """A call without a profiler, in seconds.

    wall: by the host's clock. steps: from each step's begin to its end, gaps: from there to the next, by the device's.
    """

    wall: float
    steps: tuple[float, ...]
    gaps: tuple[float, ...]

    @property
    def host(self) -> float:
        """What the device waited between steps, before the first and after the last."""
        return self.wall - sum(self.steps)

    @property
    def host_gap(self) -> HostGap:
        """Zeros for a call of one step."""
        if len(self.gaps) < 2:
            return HostGap(sum(self.gaps), sum(self.gaps))
        return HostGap(statistics.median(self.gaps), statistics.quantiles(self.gaps, n=100, method="inclusive")[-1])


class _StepEvents:
    """Records a CUDA event where each step begins and where it ends."""

    def __init__(self) -> None:
        self.begins: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []

    def begin(self, plan: StepPlan) -> None:
        self.begins.append(self._event())

    def end(self) -> None:
        self.ends.append(self._event())

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepMarks:
    """Lets a kernel that nothing else launches run where each step ends."""

    KERNEL = "spin_kernel"

    def __init__(self) -> None:
        self.count = 0

    def begin(self, plan: StepPlan) -> None:
        pass

    def end(self) -> None:
        torch.cuda._sleep(1)  # one clock cycle
        self.count += 1


@contextmanager
def observed(loop: EngineLoop, observer: StepObserver) -> Iterator[None]:
    """Tell an observer of all steps that run inside."""
    loop.observe(observer)
    try:
        yield
    finally:
        loop.observe(None)


def time_steps(llm: LLM, test: InferenceTest) -> CallTimes:
    """Run a test once; its steps as the device saw them. The events cost the host a few microseconds a step."""
    events = _StepEvents()
    with observed(llm.engine.loop, events):
        wall = call(llm, test)
    torch.cuda.synchronize(llm.engine.device)
    steps = zip(events.begins, events.ends, strict=True)
    gaps = zip(events.ends[:-1], events.begins[1:], strict=True)
    return CallTimes(
        wall,
        tuple(begin.elapsed_time(end) / 1e3 for begin, end in steps),
        tuple(end.elapsed_time(begin) / 1e3 for end, begin in gaps),
    )


def trace(llm: LLM, test: InferenceTest) -> TraceTime:
    """Run a test once under the profiler, which records what runs on the device and nothing of the host.

    Raises RuntimeError if the trace lacks steps, which happens when the profiler runs out of buffers.
    """
    marks = StepMarks()
    with observed(llm.engine.loop, marks), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call(llm, test)
    return read_trace(*profiled_work(profiled, marks.count))


def profiled_work(profiled: profile, steps: int) -> tuple[list[DeviceInterval], list[DeviceInterval]]:
    """What ran on the device, and the marks of so many steps, from a profile of steps with `StepMarks`.

    Raises RuntimeError if it lacks marks.
    """
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    # The profiler's own records: its Python events would take many times the memory.
    intervals = [
        DeviceInterval(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    ]
    work = [interval for interval in intervals if StepMarks.KERNEL not in interval.name]
    ends = [interval for interval in intervals if StepMarks.KERNEL in interval.name]
    if len(ends) != steps:
        raise RuntimeError(f"the trace holds {len(ends)} of {steps} steps; trace a shorter test")
    return work, ends
