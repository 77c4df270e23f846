"""Where the time of a served load went, from steps and deliveries laid out by hand or drawn; the logs of its steps."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.served import step_logs
from strata.bench.served.step_logs import DeviceStepLog, TracedSteps
from strata.bench.served.timeline import (
    TPOT_PARTS,
    TTFT_PARTS,
    ServedRequest,
    ServedStep,
    busy_seconds,
    latency_split,
    split_requests,
    split_wall,
    step_kinds,
)
from strata.engine.plan import Chunk, Draw, StepPlan
from strata.plan.explain.measurement import StepChunk

PROMPT = 40


def step(launched: float, begin: float, end: float, *chunks: tuple[int, int, int, int]) -> ServedStep:
    return ServedStep(launched, begin, end, tuple(StepChunk(*chunk) for chunk in chunks))


# Sequence 1 has its prompt in two chunks and then two tokens; sequence 2 comes while the second of these steps runs.
STEPS = [
    step(12, 14, 24, (1, 0, 30, 0)),
    step(15, 25, 35, (1, 30, 10, 1)),
    step(26, 36, 48, (1, 40, 1, 1), (2, 0, 40, 1)),
    step(37, 50, 53, (1, 41, 1, 1), (2, 40, 1, 1)),
]
FIRST, SECOND = ServedRequest(1, 10, (38, 50, 55)), ServedRequest(2, 20, (50, 54))


def test_tokens_that_no_step_drew_are_an_error() -> None:
    with pytest.raises(ValueError, match="sequence 7 was delivered 1 tokens that no step drew"):
        split_requests(STEPS, [ServedRequest(7, 0, (1,))])


def test_wall_time_is_idle_in_steps_or_the_hosts() -> None:
    found = split_wall([*STEPS, step(79, 80, 85, (3, 0, 4, 1))], [FIRST, SECOND, ServedRequest(3, 75, (90,))])
    assert found.wall == 90 - 10
    assert found.idle == 75 - 55
    assert found.steps == 10 + 10 + 12 + 3 + 5
    assert found.host == 4 + 1 + 1 + 2 + (55 - 53) + (80 - 75) + (90 - 85)
    assert found.host_gap.median == 1  # of 1, 1 and 2; the gap with idle time in it does not count


LAYOUT = st.lists(
    st.tuples(
        st.integers(0, 9),  # gap before the step
        st.integers(1, 20),  # its length
        st.integers(0, 30),  # how long before its begin it was launched
        st.sets(st.integers(0, 3), min_size=1),  # who is in it
    ),
    min_size=1,
    max_size=25,
)


def laid_out(layout: list[tuple[int, int, int, set[int]]]) -> list[ServedStep]:
    """Steps one after the other. A sequence's first two steps are its prompt, of which only the second draws; whoever
    is in a single step has its whole prompt there."""
    held = [[at for at, (_, _, _, who) in enumerate(layout) if sequence in who] for sequence in range(4)]
    steps: list[ServedStep] = []
    now = 100
    for at, (gap, length, ahead, who) in enumerate(layout):
        begin = now + gap
        now = begin + length
        chunks = []
        for sequence in sorted(who):
            place, whole = held[sequence].index(at), len(held[sequence]) == 1
            is_prompt, draws = place < 2, place > 0 or whole
            chunks.append((sequence, place, PROMPT if is_prompt else 1, int(draws)))
        steps.append(step(begin - ahead, begin, now, *chunks))
    return steps


@given(LAYOUT, st.lists(st.integers(0, 40), min_size=4, max_size=4), st.lists(st.integers(0, 9), min_size=50))
def test_every_moment_is_counted_once(
    layout: list[tuple[int, int, int, set[int]]], waits: list[int], delays: list[int]
) -> None:
    steps = laid_out(layout)
    requests = []
    for sequence in range(4):
        drew = [one for one in steps if any(chunk[0] == sequence and chunk.draws for chunk in one.chunks)]
        entered = next((one for one in steps if any(chunk[0] == sequence for chunk in one.chunks)), None)
        if entered is not None:
            due = entered.launched - waits[sequence]
            requests.append(
                ServedRequest(sequence, due, tuple(one.end + late for one, late in zip(drew, delays, strict=False)))
            )
    for request, split in zip(requests, split_requests(steps, requests), strict=True):
        holds = [one for one in steps if any(chunk[0] == request.sequence for chunk in one.chunks)]
        drew = [one for one in holds if any(chunk[0] == request.sequence and chunk.draws for chunk in one.chunks)]
        counted = dict.fromkeys(TTFT_PARTS, 0)
        for at in range(int(request.due), int(request.times[0])):
            if at < holds[0].launched:
                part = "queueing until launched"
            elif at < holds[0].begin:
                part = "behind earlier steps"
            elif at >= drew[0].end:
                part = "delivery"
            else:
                part = "prefill steps" if any(one.begin <= at < one.end for one in holds) else "between steps"
            counted[part] += 1
        assert split.ttft == counted
        assert (split.tpot is None) == (len(request.times) == 1)
        if split.tpot is not None:
            tokens = len(request.times) - 1
            assert list(split.tpot) == list(TPOT_PARTS)
            assert sum(split.tpot.values()) == pytest.approx((request.times[-1] - request.times[0]) / tokens)
            inside = range(int(drew[0].end), int(drew[-1].end))
            ran = {at: one for one in holds for at in range(int(one.begin), int(one.end))}
            shared = sum(at in ran and ran[at].has_prompts for at in inside)
            assert split.tpot["steps with prompts"] * tokens == pytest.approx(shared)
            assert split.tpot["between steps"] * tokens == pytest.approx(sum(at not in ran for at in inside))
    wall = split_wall(steps, requests)
    first, last = min(one.due for one in requests), max(one.times[-1] for one in requests)
    moments = range(int(first), int(last))
    ran_at = {at for one in steps for at in range(int(one.begin), int(one.end))} & set(moments)
    there = {at for one in requests for at in range(int(one.due), int(one.times[-1]))}
    assert wall.wall == len(moments)
    assert wall.steps == len(ran_at)
    assert wall.host == len(there - ran_at)
    assert wall.idle == len(set(moments) - there - ran_at)
    gaps = [range(int(one.end), int(two.begin)) for one, two in pairwise(steps)]
    busy = [len(gap) for gap in gaps if set(gap) <= there]
    assert min(busy, default=0) <= wall.host_gap.median <= max(busy, default=0)


def test_parts_around_a_percentile_add_up_to_latencies_next_to_it() -> None:
    split = latency_split([{"a": rank / 1e3, "b": 2 * rank / 1e3} for rank in range(100)])
    assert split.p50 == pytest.approx(3 * 49.5)
    assert split.p99 == pytest.approx(3 * 98.01)
    assert split.parts["a"] == pytest.approx({"mean": 49.5, "p50": 49.5, "p99": 98.5})  # ranks 45 to 54, 98 and 99
    assert split.parts["b"] == pytest.approx({name: 2 * value for name, value in split.parts["a"].items()})
    few = latency_split([{"a": 3e-3}, {"a": 1e-3}, {"a": 2e-3}])
    assert few.parts == {"a": pytest.approx({"mean": 2, "p50": 2, "p99": 3})}


def test_kernels_of_a_step_are_those_of_traced_steps_of_its_size() -> None:
    decodes = tuple((sequence, 50, 1, 1) for sequence in range(5))
    steps = [step(0, 0, 10, *decodes), step(10, 10, 21, *decodes[:3]), step(21, 21, 29, *decodes), STEPS[0]]
    sizes = [one.size for one in steps]
    assert sizes == [(False, 8), (False, 4), (False, 8), (True, 32)]
    traced = [((False, 8), 6.0), ((False, 8), 8.0), ((False, 4), 11.0)]
    # A prompt was not traced: of the others 25 of 29 seconds are kernels.
    assert busy_seconds(steps, traced) == pytest.approx([7, 11, 7, 10 * 25 / 29])
    assert busy_seconds(steps, []) == [10, 11, 8, 10]


def test_steps_with_prompts_are_told_from_those_of_decodes_alone() -> None:
    kinds = step_kinds(STEPS, [1, 2, 3, 1], [9, 9, 11, 2])
    alone, shared = kinds["decodes alone"], kinds["with prompts"]
    assert (alone.steps, alone.seconds, alone.floor, alone.busy, alone.sequences) == (1, 3, 1, 2, 2)
    assert (shared.steps, shared.seconds, shared.floor, shared.busy, shared.median) == (3, 32, 6, 29, 10)
    assert shared.tokens == pytest.approx((30 + 10 + 41) / 3)
    assert step_kinds(STEPS[:1], None, [9])["with prompts"].floor is None


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


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> FakeProfile:
    """Of a device in the place of CUDA's."""
    device = FakeDevice()
    profile = FakeProfile(device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: profile.run("spin_kernel", 1e-6))
    monkeypatch.setattr(step_logs, "profile", lambda activities: profile)
    return profile


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


def test_as_many_steps_are_traced_as_were_asked_for(profile: FakeProfile) -> None:
    device = profile.device
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


def test_a_load_that_ends_first_leaves_a_shorter_trace(profile: FakeProfile) -> None:
    device = profile.device
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
