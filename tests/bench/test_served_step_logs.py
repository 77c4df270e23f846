"""Times of steps by the host's clock, from a device whose clock is another."""

from __future__ import annotations

import pytest
import torch

from strata.bench.served.step_logs import DeviceStepLog
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
