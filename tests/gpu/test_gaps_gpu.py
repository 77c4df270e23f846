"""What the benchmark sees of an engine's steps on a GPU, with a host that is fast and one that sleeps."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from strata.bench.run import Setup, call, started
from strata.bench.workloads import InferenceTest, random_prompts
from strata.engine.llm import LLM
from strata.models.folder import BUILTIN_FOLDER

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SLEEP = 0.01
# Both prompts in one step, then a token of each a step.
TEST, STEPS = InferenceTest("small", random_prompts(2, 20), (30, 30)), 30


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = started(Setup(str(BUILTIN_FOLDER), None, "bfloat16", "cuda", False), TEST)
    call(made, TEST)
    return made


def test_steps_by_events_and_by_the_trace_are_the_same(llm: LLM) -> None:
    from strata.bench.step_observers import time_steps, trace

    times, traced = time_steps(llm, TEST), trace(llm, TEST)
    assert len(times.steps) == traced.steps == STEPS
    assert len(times.gaps) == STEPS - 1
    assert min(times.steps) > 0
    assert min(times.gaps) >= 0
    assert 0 < traced.busy < traced.span
    assert 0 <= traced.host <= traced.span - traced.busy
    assert traced.busy < times.wall
    assert {"product", "attention", "sampling", "copy"} <= set(traced.kinds)
    assert traced.kernels_per_step > 10


def test_a_host_that_sleeps_is_seen_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.bench.step_observers import time_steps, trace

    scheduler = llm.engine.loop.scheduler
    schedule = scheduler.schedule

    def slow(*given: Any) -> Any:
        time.sleep(SLEEP)
        return schedule(*given)

    usual = time_steps(llm, TEST).host_gap.median
    monkeypatch.setattr(scheduler, "schedule", slow)
    assert time_steps(llm, TEST).host_gap.median > usual + SLEEP / 2
    assert trace(llm, TEST).host > STEPS * SLEEP / 2


def test_nothing_is_observed_afterwards(llm: LLM) -> None:
    from strata.bench.step_observers import trace

    before = trace(llm, TEST).steps
    call(llm, TEST)
    assert trace(llm, TEST).steps == before


def test_a_served_host_that_sleeps_is_found_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.bench.load.request_sets import EvenLengths
    from strata.bench.served.client import ServedEngine, random_load
    from strata.bench.served.measure import numbered
    from strata.bench.served.step_logs import DeviceStepLog
    from strata.bench.served.timeline import split_requests, split_wall
    from strata.bench.step_observers import observed

    loop = llm.engine.loop
    schedule = loop.scheduler.schedule

    def slow(*given: Any) -> Any:
        time.sleep(SLEEP)
        return schedule(*given)

    monkeypatch.setattr(loop.scheduler, "schedule", slow)
    log = DeviceStepLog(loop.clock)
    with observed(loop, log):
        answered = ServedEngine(llm.engine, "builtin").serve(
            random_load(EvenLengths(20, 20), 1, math.inf, 0, 4096), "slow"
        )
    steps = log.steps()
    (request,) = numbered(answered, steps)
    (split,) = split_requests(steps, [request])
    assert split.tpot is not None
    assert split.tpot["between steps"] > SLEEP / 2 > split.tpot["decode steps"]
    assert split_wall(steps, [request]).host_gap.median > SLEEP / 2
