"""Times of steps by the host's clock, from a device whose clock is another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.bench.served import step_logs
from strata.bench.served.step_logs import DeviceStepLog, TracedSteps
from strata.engine.plan import Chunk, Draw, StepPlan

# The device's clock began elsewhere, and gains 50 us a second.
START, RATE = 1234.5, 1 + 50e-6


class FakeDevice:
    """A host's clock, and a device that is busy for as long as it is given work."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy_until = 0.0

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def run(self, seconds: float) -> tuple[float, float]:
        """Enqueue work; when it begins and ends by the host's clock."""
        begin = max(self.now, self.busy_until)
        self.busy_until = begin + seconds
        return begin, self.busy_until

    def event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = START + RATE * max(self.device.now, self.device.busy_until)

    def synchronize(self) -> None:
        self.device.now += 3e-6

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at - self.at)


class FakeProfile:
    """A profiler's records of what a device runs between `start` and `stop`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.records: list[tuple[str, float, float]] = []
        self.running = False
        self.profiler = SimpleNamespace(kineto_results=self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        assert self.device.busy_until <= self.device.now, "the device is at work on a step that will be traced in part"
        self.running = True

    def stop(self) -> None:
        assert self.device.busy_until <= self.device.now, "a step of the trace has not ended"
        self.running = False

    def run(self, name: str, seconds: float) -> None:
        begin, end = self.device.run(seconds)
        if self.running:
            self.records.append((name, begin, end))

    def events(self) -> list[Any]:
        def event(name: str, begin: float, end: float) -> Any:
            return SimpleNamespace(
                name=lambda: name,
                start_ns=lambda: round(1e9 * begin),
                duration_ns=lambda: round(1e9 * end) - round(1e9 * begin),
                device_type=lambda: SimpleNamespace(name="CUDA"),
            )

        return [event(*record) for record in self.records]


def plan(*chunks: tuple[int, int, int]) -> StepPlan:
    """Of (sequence, start, tokens)."""
    made = tuple(Chunk(sequence, 0, start, count, (Draw(sequence, 0),), 0, ()) for sequence, start, count in chunks)
    return StepPlan((), (), made, (), sum(chunk.count for chunk in made))


def test_times_of_a_device_whose_clock_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    log = DeviceStepLog(device.clock)
    ran, launched = [], []
    for number in range(200):
        device.now += 0.01 if number % 20 == 0 else 1e-4  # the device waits now and then
        launched.append(device.now)
        log.begin(plan((number, 0, 7), (5, number, 1)))
        ran.append(device.run(0.003))
        log.end()
    steps = log.steps()
    assert [step.begin for step in steps] == pytest.approx([begin for begin, _ in ran], abs=5e-6)
    assert [step.end for step in steps] == pytest.approx([end for _, end in ran], abs=5e-6)
    assert [step.launched for step in steps] == pytest.approx(launched, abs=5e-6)
    assert [tuple(chunk) for chunk in steps[3].chunks] == [(3, 0, 7, 1), (5, 3, 1, 1)]


def test_as_many_steps_are_traced_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    profile = FakeProfile(device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: profile.run("spin_kernel", 1e-6))
    monkeypatch.setattr(step_logs, "profile", lambda activities: profile)
    traced = TracedSteps(device.clock, after=0.05, most=4)
    done_after = None
    for number in range(80):
        if traced.poll():
            done_after = number
            break
        device.now += 1e-3  # the host is ahead of the device
        traced.begin(plan((1, number, 1), (2, 0, 30 if number % 2 else 1)))
        profile.run("gemv_kernel", 0.002)
        device.run(0.001)
        profile.run("rms_norm_kernel", 0.001 if number % 2 else 0.003)
        traced.end()
    assert done_after is not None
    assert done_after > 50
    found = traced.result()
    assert found is not None
    total, steps = found
    assert (total.steps, total.kernels_per_step) == (4, 2)
    odd = [bool(number % 2) for number in range(done_after - 4, done_after)]
    assert [size for size, _ in steps] == [(True, 32) if one else (False, 2) for one in odd]
    assert [busy for _, busy in steps] == pytest.approx([0.003 if one else 0.005 for one in odd])
    assert traced.poll()


def test_a_load_that_ends_first_leaves_a_shorter_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    profile = FakeProfile(device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: profile.run("spin_kernel", 1e-6))
    monkeypatch.setattr(step_logs, "profile", lambda activities: profile)
    traced = TracedSteps(device.clock, after=0.0, most=4)
    for number in range(3):
        assert not traced.poll()
        traced.begin(plan((1, number, 1)))
        profile.run("gemv_kernel", 0.002)
        traced.end()
    traced.stop()
    found = traced.result()
    assert found is not None
    assert found[0].steps == 2
    never = TracedSteps(device.clock, after=0.0)
    never.stop()
    assert never.result() is None
