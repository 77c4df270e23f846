"""Observers of an engine under a load: when each step ran and what it ran, and the kernels of some hundred steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from strata.bench.served.timeline import ServedStep
from strata.bench.step_observers import StepMarks, profiled_work
from strata.bench.trace import TraceTime, busy_of_steps, read_trace
from strata.engine.plan import StepPlan
from strata.plan.explain.measurement import StepChunk

Clock = Callable[[], float]
# Steps that are traced: at 160 kernels each, a trace of some ten megabytes.
TRACED_STEPS = 200
# Readings of the two clocks, of which the closest counts.
_READINGS = 20


class _Plans:
    """What steps run, as numbers that the garbage collector does not walk."""

    def __init__(self) -> None:
        self._chunks: list[array[int]] = []
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan

    def end(self) -> None:
        """Noted at the end of a step, when the device has its work already."""
        assert self._plan is not None
        chunks = self._plan.chunks
        numbers = [number for one in chunks for number in (one.sequence, one.start, one.count, len(one.draws))]
        self._chunks.append(array("q", numbers))
        self._plan = None

    def chunks(self) -> Iterator[tuple[StepChunk, ...]]:
        for numbers in self._chunks:
            four = iter(numbers)
            yield tuple(map(StepChunk, four, four, four, four))


class HostStepLog:
    """Where the host itself computes: a step is over when it has been launched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans = _Plans()
        self._times: list[tuple[float, float]] = []
        self._begun = 0.0

    def begin(self, plan: StepPlan) -> None:
        self._plans.begin(plan)
        self._begun = self._clock()

    def end(self) -> None:
        self._times.append((self._begun, self._clock()))
        self._plans.end()

    def steps(self) -> list[ServedStep]:
        times = zip(self._times, self._plans.chunks(), strict=True)
        return [ServedStep(begin, begin, end, chunks) for (begin, end), chunks in times]


class DeviceStepLog:
    """CUDA events where each step begins and ends. They cost the host a few microseconds a step.

    Both clocks are read together before the first step and after the last; between, the device's is taken to be as much
    faster or slower as these say.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans = _Plans()
        self._launched: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._first, self._start = self._read_clocks()

    def begin(self, plan: StepPlan) -> None:
        self._plans.begin(plan)
        self._launched.append(self._clock())
        self._events.append(_recorded_event())

    def end(self) -> None:
        self._events.append(_recorded_event())
        self._plans.end()

    def steps(self) -> list[ServedStep]:
        last, end = self._read_clocks()
        events = [self._first, *self._events, last]
        device = list(accumulate(before.elapsed_time(after) / 1e3 for before, after in pairwise(events)))
        scale = (end - self._start) / device[-1]
        times = [self._start + scale * at for at in device[:-1]]
        found = zip(self._launched, times[::2], times[1::2], self._plans.chunks(), strict=True)
        return [ServedStep(*times_and_chunks) for times_and_chunks in found]

    def _read_clocks(self) -> tuple[torch.cuda.Event, float]:
        """An event, and the host's time of it: halfway between before it was recorded and after it was over."""
        torch.cuda.synchronize()
        readings = []
        for _ in range(_READINGS):
            before = self._clock()
            event = _recorded_event()
            event.synchronize()
            after = self._clock()
            readings.append((after - before, event, (before + after) / 2))
        _, event, at = min(readings, key=lambda reading: reading[0])
        return event, at


StepLog = HostStepLog | DeviceStepLog


def step_log(device: torch.device, clock: Clock) -> StepLog:
    """An observer that knows afterwards which steps ran and when. clock: of the host, in seconds."""
    return DeviceStepLog(clock) if device.type == "cuda" else HostStepLog(clock)


class TracedSteps:
    """Traces some steps of a load: `poll` begins and ends it, between two steps.

    The profiler slows the host. So the times of steps are not taken from here, but those of kernels are.

    clock: of the host, in seconds. after: seconds from the first step to the first that is traced.
    """

    def __init__(self, clock: Clock, after: float, most: int = TRACED_STEPS) -> None:
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.cuda._sleep(1)  # the first use of a profiler in a process takes seconds
            torch.cuda.synchronize()
        self._clock, self._after, self._most = clock, after, most
        self._marks, self._plans = StepMarks(), _Plans()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._due: float | None = None
        self._running = self._done = False

    def begin(self, plan: StepPlan) -> None:
        if self._due is None:
            self._due = self._clock() + self._after
        if self._running:
            self._plans.begin(plan)

    def end(self) -> None:
        if self._running:
            self._marks.end()
            self._plans.end()

    def poll(self) -> bool:
        """Returns whether all steps have been traced."""
        if self._running and self._marks.count == self._most:
            self.stop()
        elif not self._running and not self._done and self._due is not None and self._clock() >= self._due:
            torch.cuda.synchronize()  # what is under way is no step of the trace
            self._profile.start()
            self._running = True
        return self._done

    def stop(self) -> None:
        """End a trace that has begun."""
        if self._running:
            torch.cuda.synchronize()
            self._profile.stop()
            self._running, self._done = False, True

    def result(self) -> tuple[TraceTime, list[tuple[tuple[bool, int], float]]] | None:
        """What ran on the device, and of each step its size and the seconds in which kernels ran; None if no step was
        traced. Raises RuntimeError if the trace lacks steps."""
        if not self._marks.count:
            return None
        work, marks = profiled_work(self._profile, self._marks.count)
        sizes = [ServedStep(0.0, 0.0, 0.0, chunks).size for chunks in self._plans.chunks()]
        return read_trace(work, marks), list(zip(sizes, busy_of_steps(work, marks), strict=True))


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
