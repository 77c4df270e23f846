"""Steps that are launched late: arrivals get into them, the device does not idle, and surprises are learnt."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean, median

import pytest

from strata.cache.pages import PageAllocator
from strata.engine.plan import Chunk, StepPlan
from strata.engine.request import Request
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.late_launch import LEAST, MARGIN, LateLaunch
from strata.engine.scheduling.prompt_budget import StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_prompt_budget import of
from tests.engine.scheduling.test_under_load import request, waits
from tests.engine.simulated import SimulatedRunner, Simulation, Unchecked, drive

MS = 1e-3
DECODE, HOST = 4.6 * MS, 0.8 * MS
Seconds = Callable[[StepPlan], float]


def has_prompts(plan: StepPlan) -> bool:
    return plan.tokens > len(plan.chunks)


def steady(plan: StepPlan) -> float:
    """About what 8B takes on an H200, in sizes of 64 tokens."""
    return 2.5 * MS + 1.6 * MS * -(-plan.tokens // 64) if has_prompts(plan) else DECODE


def run(
    requests: list[Request], late: bool, seconds: Seconds = steady, host: float | Seconds = HOST, slots: int = 64
) -> Simulation:
    config = SchedulerConfig(slots, 8192, 20_000, target=StepTarget(20 * MS, of("8B")))
    runner = SimulatedRunner(Unchecked(), seconds, host if callable(host) else lambda plan: host)
    return drive(Scheduler(config, PageAllocator(60_000, 16), None), runner, requests, run_ahead=True, late=late)


def streams(count: int, outputs: int) -> list[Request]:
    return [request(f"stream {number}", 64, outputs) for number in range(count)]


def gaps(found: Simulation) -> list[float]:
    """Seconds between each two steps on the device, without the first steps, which nothing can follow at once."""
    return [after[1] - before[2] for before, after in pairwise(found.runner.steps)][2:]


def test_without_arrivals_the_steps_are_the_same() -> None:
    requests = [request(str(number), 40 + number, 60 + number) for number in range(20)]
    for host in (0.0, HOST, DECODE, 2 * DECODE):
        late, early = (run(requests, late, host=host) for late in (True, False))
        assert late.runner.steps == early.runner.steps


@pytest.mark.parametrize("after", [0.1, 0.5, 0.75])
def test_a_request_that_comes_during_a_step_is_in_the_next(after: float) -> None:
    """after: which share of the step has passed."""
    begin = run(streams(4, 200), late=False).runner.steps[100][1]
    requests = [*streams(4, 200), request("new", 64, 2, begin + after * DECODE)]
    for late, want in ((True, 101), (False, 102)):
        steps = run(requests, late).runner.steps
        assert steps[100][1] == begin
        assert next(number for number, (plan, *_) in enumerate(steps[50:], 50) if plan.new) == want


def test_a_request_that_comes_while_the_next_step_is_launched_is_in_the_one_behind() -> None:
    begin = run(streams(4, 200), late=False).runner.steps[100][1]
    steps = run([*streams(4, 200), request("new", 64, 2, begin + DECODE - 0.5 * HOST)], late=True).runner.steps
    assert next(number for number, (plan, *_) in enumerate(steps[50:], 50) if plan.new) == 102


@pytest.mark.parametrize("seed", range(5))
def test_the_device_does_not_idle_while_times_stay_within_what_was_learnt(seed: int) -> None:
    source = random.Random(seed)

    def seconds(plan: StepPlan) -> float:
        keys = sum(chunk.start + chunk.count for chunk in plan.chunks)
        return steady(plan) + 37e-9 * keys + source.uniform(0, 0.1 * MS)

    arrivals = accumulate(source.expovariate(20) for _ in range(60))
    others = [
        request(str(number), source.randint(16, 3000), source.randint(1, 200), at) for number, at in enumerate(arrivals)
    ]
    found = run([*streams(2, 800), *others], late=True, seconds=seconds)
    assert max(gaps(found)) < 1e-9


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_shorter_steps_leave_one_gap_and_are_learnt(share: float) -> None:
    """As when the device runs faster from some time on."""
    count = itertools.count()
    found = run(streams(4, 400), late=True, seconds=lambda plan: steady(plan) * (share if next(count) >= 200 else 1))
    left = [gap for gap in gaps(found) if gap > 1e-9]
    assert len(left) == 1
    assert left[0] < (1 - share) * DECODE


def test_a_step_that_is_a_little_shorter_leaves_no_gap() -> None:
    count = itertools.count()
    found = run(streams(4, 400), late=True, seconds=lambda plan: steady(plan) - MARGIN * (next(count) >= 200))
    assert max(gaps(found)) < 1e-9


@pytest.mark.parametrize("every", [7, 40])
def test_launches_that_take_longer_now_and_then_cost_little(every: int) -> None:
    """What a launch takes longer is in the lead if it happens often; else it costs what it took."""
    count = itertools.count()

    def host(plan: StepPlan) -> float:
        return 3 * HOST if next(count) % every == 0 else HOST

    found = run(streams(4, 800), late=True, host=host)
    assert sum(gaps(found)[20:]) < (0.003 if every == 40 else 1e-9) * found.runner.now


@pytest.mark.parametrize("host", [1.3 * DECODE, 2 * DECODE])
def test_where_a_launch_takes_as_long_as_a_step_nothing_waits(host: float) -> None:
    requests = [*streams(4, 200), *(request(str(number), 64, 50, 0.1 * number) for number in range(8))]
    late, early = (run(requests, late, host=host) for late in (True, False))
    assert late.runner.steps == early.runner.steps


def test_nothing_waits_where_an_arrival_would_find_no_slot() -> None:
    requests = [*streams(8, 200), request("new", 64, 8, 0.3)]
    late, early = (run(requests, late, slots=8) for late in (True, False))
    assert late.runner.steps == early.runner.steps


def test_a_longest_sequence_that_ends_leaves_no_gap() -> None:
    requests = [*streams(4, 400), request("long", 15_000, 200)]
    found = run(
        requests, late=True, seconds=lambda plan: steady(plan) + 200e-9 * sum(chunk.start for chunk in plan.chunks)
    )
    assert max(gaps(found)) < 1e-9


@pytest.mark.parametrize("slots", [8, 64])
def test_at_20_requests_a_second_first_tokens_come_sooner_and_others_no_later(slots: int) -> None:
    source = random.Random(0)
    arrivals = accumulate(source.expovariate(20) for _ in range(200))
    requests = [request(str(number), 512, 128, at) for number, at in enumerate(arrivals)]
    late, early = (run(requests, late, slots=slots) for late in (True, False))
    assert fmean(pace(late)) < 1.01 * fmean(pace(early))
    if slots == 64:
        assert median(waits(late)) < median(waits(early)) - 0.6 * DECODE
        assert fmean(waits(late)) < fmean(waits(early)) - 0.6 * DECODE


def pace(found: Simulation) -> list[float]:
    """Seconds of a token after the first, of each request."""
    return [(found.last[name] - found.first[name]) / 127 for name in found.first]


def test_nothing_waits_where_the_next_step_needs_known_ids() -> None:
    requests = [*streams(4, 200), *(request(str(number), 64, 50, 0.1 * number) for number in range(8))]
    requests[0] = replace(requests[0], bad_words=((5, 6),))
    late, early = (run(requests, late) for late in (True, False))
    assert late.runner.steps == early.runner.steps


class TestLateLaunch:
    """With a clock of its own: decodes of 10 ms, launched in 1 ms."""

    def setup_method(self) -> None:
        self.now = 0.0
        self.late = LateLaunch(lambda: self.now)
        self.launch(alone=True)

    def launch(self, size: str | None = "captured", took: float = 1 * MS, alone: bool = False, keys: int = 100) -> None:
        began, self.now = self.now, self.now + took
        self.late.launched(decodes(*[keys] * 3), size, began, alone)

    def follow(self, count: int, size: str | None = "captured", took: float = 10 * MS) -> None:
        """So many steps end, each with the next one launched at once."""
        for _ in range(count):
            end = self.now + took
            self.launch(size)
            self.now = end
            self.late.completed(in_time=True)

    def test_it_waits_once_three_steps_have_been_seen_whole(self) -> None:
        self.follow(LEAST + 1)  # the begin of the first is not known
        assert self.late.remaining() == pytest.approx(0.98 * 10 * MS - MARGIN - 1 * MS)
        assert not self.waits_after(LEAST)

    def test_a_launch_comes_earlier_by_as_much_as_other_ranks_are_behind(self) -> None:
        self.follow(LEAST + 1)
        alone = self.late.remaining()
        self.late, self.now = LateLaunch(lambda: self.now, behind=0.3 * MS), 0.0
        self.launch(alone=True)
        self.follow(LEAST + 1)
        assert self.late.remaining() == pytest.approx(alone - 0.3 * MS)

    def waits_after(self, count: int) -> bool:
        self.setup_method()
        self.follow(count)
        return self.late.remaining() > 0

    def test_steps_without_a_size_are_followed_at_once(self) -> None:
        self.follow(20, size=None)
        assert self.late.remaining() == 0

    def test_what_ended_too_soon_is_measured_anew(self) -> None:
        self.follow(20)
        assert self.late.remaining() > 0
        self.launch()
        self.late.completed(in_time=False)
        assert self.late.remaining() == 0
        self.follow(LEAST + 1, took=5 * MS)
        assert 2 * MS < self.late.remaining() < 4 * MS

    def test_fewer_keys_than_ever_seen_make_a_step_shorter_in_proportion(self) -> None:
        self.follow(20)
        self.launch(keys=50)
        self.now += 9 * MS
        self.late.completed(in_time=True)
        assert self.late.remaining() == pytest.approx(0.98 * 10 * MS * 153 / 303 - MARGIN - 1 * MS)

    def test_waking_late_counts_as_time_of_the_launch(self) -> None:
        self.follow(20)
        for _ in range(3):
            due = self.now + self.late.wait()
            end = self.now + 10 * MS
            self.now = due + 0.4 * MS
            self.launch()
            self.now = end
            self.late.completed(in_time=True)
        assert self.late.remaining() == pytest.approx(0.98 * 10 * MS - MARGIN - 1.4 * MS)

    def test_what_something_else_ran_beside_is_not_learnt(self) -> None:
        self.follow(20)
        for _ in range(20):
            self.late.forget_under_way()
            assert self.late.remaining() == 0
            self.follow(1, took=40 * MS)
        self.follow(1)
        assert self.late.remaining() == pytest.approx(0.98 * 10 * MS - MARGIN - 1 * MS)


def decodes(*starts: int) -> StepPlan:
    return StepPlan((), (), tuple(Chunk(i, i, at, 1, (), 0, ()) for i, at in enumerate(starts)), (), len(starts))
