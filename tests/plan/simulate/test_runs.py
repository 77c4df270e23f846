"""Rounds that are played at once, against the same rounds one by one, and what needs no prefix tree."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from strata.cache.pages import NONE_SHARED, SharedKeys
from strata.engine.plan import StepPlan
from strata.engine.scheduling.config import SchedulerConfig
from strata.plan.simulate.fleet import NOTICED_SECONDS, Failure, Fleet, FleetConfig
from strata.plan.simulate.host import SERVER, HostTimes
from strata.plan.simulate.prices import Line
from strata.plan.simulate.replica import EngineShape
from strata.plan.simulate.request import SimulatedRequest, blank_prompt

HOST = SERVER
SLOW_HOST = replace(HOST, step=4e-3)


@dataclass
class Linear:
    """About what 8B takes on an H200; all plans are kept."""

    def __post_init__(self) -> None:
        self.plans: list[StepPlan] = []

    def price(self, plan: StepPlan) -> tuple[float, Any]:
        self.plans.append(plan)
        count = len(plan.chunks)
        if plan.tokens == count:
            keys = sum(chunk.start for chunk in plan.chunks) + count
            line = self.decodes(count, keys, plan.shared)
            return line.seconds(keys), line.size
        return 4e-3 + 20e-6 * plan.tokens, ("prompts", plan.tokens // 64)

    def decodes(self, sequences: int, keys: int, shared: SharedKeys = NONE_SHARED) -> Line:
        """Lines that meet at every thousand keys."""
        upto = (keys // 1000 + 1) * 1000
        base = 4e-3 + 1e-5 * sequences - 1e-7 * shared.repeated
        return Line(upto, base, 1e-8 + 1e-12 * upto, ("decodes", -(-sequences // 8)))


def load(count: int, rate: float, *, shared: bool = False) -> list[SimulatedRequest]:
    source, at, found = random.Random(count * rate), 0.0, []
    common = [tuple(source.choices(range(1, 99), k=320)) for _ in range(3)]
    for _ in range(count):
        at += source.expovariate(rate)
        own = source.randint(16, 700)
        prompt = source.choice(common) + tuple(source.choices(range(1, 99), k=own)) if shared else blank_prompt(own)
        found.append(SimulatedRequest(at, prompt, source.randint(1, 200)))
    return found


def play(
    requests: list[SimulatedRequest], *, in_runs: bool, host: HostTimes = HOST, late: bool = True, **more: Any
) -> tuple[Fleet, Linear]:
    options: dict[str, Any] = {"pages": 2000, "replicas": 2, "caches": False} | more
    scheduler = SchedulerConfig(max_sequences=12, max_tokens=1024, max_length=2048)
    shape = EngineShape(scheduler, options.pop("pages"), 16, options.pop("caches"), is_late=late)
    prices = Linear()
    fleet = Fleet(FleetConfig(shape, options.pop("replicas"), in_runs=in_runs, **options), prices, host, requests)
    fleet.run()
    for scheduler_of in fleet.schedulers:
        scheduler_of.check()
    return fleet, prices


CASES: dict[str, dict[str, Any]] = {
    "below saturation": {},
    "few pages, so that some are preempted": {"pages": 160},
    "launched at once": {"late": False},
    "a host slower than the device": {"host": SLOW_HOST},
    "a bound on requests": {"max_concurrency": 9, "replicas": 1},
    "shared prefixes": {"caches": True, "pages": 300},
    "an engine that fails": {"failures": (Failure(1, 1.0, 2.0),)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rounds_at_once_are_what_they_are_one_by_one(case: dict[str, Any]) -> None:
    """Every time of every request to the last bit, and every plan that is made is one of those made one by one."""
    requests = load(120, 25.0, shared=case.get("caches", False))
    (runs, few), (single, all_plans) = (play(requests, in_runs=in_runs, **case) for in_runs in (True, False))
    assert runs.outcomes.first == single.outcomes.first
    assert runs.outcomes.last == single.outcomes.last
    assert runs.outcomes.faults == single.outcomes.faults
    assert [one.statistics for one in runs.schedulers] == [one.statistics for one in single.schedulers]
    assert decisions(few) <= decisions(all_plans)
    if case.get("host") is SLOW_HOST:
        assert len(few.plans) == len(all_plans.plans)
    else:
        assert len(few.plans) < 0.6 * len(all_plans.plans)


def decisions(prices: Linear) -> set[tuple[tuple[int, int, int], ...]]:
    """What each plan runs. Of rounds at once nobody is told which slots ended before them and which pages came in."""
    return {tuple((chunk.sequence, chunk.start, chunk.count) for chunk in plan.chunks) for plan in prices.plans}


def test_what_shares_nothing_needs_no_prefix_tree() -> None:
    """The same times, whatever pages are kept for a use that never comes: as long as none is preempted, since that one
    would find what it had computed."""
    source = random.Random(1)
    requests = load(150, 30.0)
    named = [replace(one, prompt=tuple(source.choices(range(1, 50_000), k=len(one.prompt)))) for one in requests]
    (with_tree, _), (without, _) = play(named, in_runs=True, caches=True), play(requests, in_runs=True)
    assert with_tree.outcomes.first == without.outcomes.first
    assert with_tree.outcomes.last == without.outcomes.last
    assert sum(one.statistics.preemptions for one in without.schedulers) == 0


def test_a_failure_keeps_nobody_waiting_who_comes_before_it_is_noticed() -> None:
    """The first request's engine ends while it computes the prompt; the second comes 0.1 s later to the other."""
    alone, _ = play([SimulatedRequest(1.1, blank_prompt(600), 20)], in_runs=True)
    requests = [SimulatedRequest(1.0, blank_prompt(900), 20), SimulatedRequest(1.1, blank_prompt(600), 20)]
    both, _ = play(requests, in_runs=True, failures=(Failure(0, 1.01, 2.0),))
    assert not both.outcomes.faults
    assert both.outcomes.first[1] == alone.outcomes.first[0]
    assert both.outcomes.first[0] > 1.01 + NOTICED_SECONDS


def test_an_engine_that_is_down_cannot_fail() -> None:
    with pytest.raises(ValueError, match=r"engine 1 fails at 2 s, but is down from 1 to 3 s"):
        play([], in_runs=True, failures=(Failure(1, 2.0, 1.0), Failure(0, 2.0, 9.0), Failure(1, 1.0, 2.0)))


@pytest.mark.parametrize("parse", [4e-4, 5e-2])
def test_no_more_requests_are_under_way_than_may_be(parse: float) -> None:
    """Also where the host parses them more slowly than engines answer: who waits for it is under way."""
    requests = [replace(one, due=0.0) for one in load(150, 30.0)]
    fleet, _ = play(requests, in_runs=True, host=replace(HOST, parse=parse), max_concurrency=9)
    sent, last = fleet.outcomes.sent, fleet.outcomes.last
    under_way = [sum(sent[other] <= at < last[other] for other in range(len(sent))) for at in sent]
    assert max(under_way) == 9
    assert sum(last) - sum(sent) == pytest.approx(9 * max(last), rel=0.05)  # and no fewer, but in the end
