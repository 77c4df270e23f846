"""A step brings a sequence one id or more: rows behind drafts, what is accepted of them, and what is taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.cache.snapshots import Snapshots
from strata.engine.collect import Collector, Delivery
from strata.engine.loop import EngineLoop
from strata.engine.plan import REJECTED, Chunk, Draw, PlanArrays, StepPlan
from strata.engine.request import Request, Sequence, Update
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling import states
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.plans import request
from tests.engine.simulated import (
    LONGEST,
    Device,
    SimulatedRunner,
    SimulatedStep,
    linear,
    uncrowded,
)


def scheduler(
    draws: int, pages: int = 100, slots: int = 8, budget: int = 64, snapshots: Snapshots | None = None
) -> Scheduler:
    allocator = PageAllocator(pages, 4)
    config = SchedulerConfig(slots, budget, 100, draws=draws)
    return Scheduler(config, allocator, PrefixTree(allocator, [snapshots] if snapshots else ()), (), snapshots)


def running(of: Scheduler, prompt: int = 6, **params: object) -> Sequence:
    """A sequence that has drawn its first id."""
    (sequence,) = of.add(request("a", prompt, **params))
    while not sequence.outputs:
        plan = planned(of)
        of.complete(plan, [7] * len(plan.draws))
    return sequence


def planned(of: Scheduler) -> StepPlan:
    plan = of.schedule()
    of.check()
    assert plan is not None
    return plan


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.start, chunk.count, len(chunk.draws)) for chunk in plan.chunks]


class TestRows:
    def test_each_draw_of_a_sequence_has_a_row_and_the_last_one_the_last(self) -> None:
        own, other = Draw(5, 0), Draw(6, 3)
        chunks = (Chunk(9, 2, 7, 1, (Draw(9, 2),), 0, ()), Chunk(5, 0, 20, 4, (own,) * 4, 0, ()))
        arrays = PlanArrays(StepPlan((), (), (*chunks, Chunk(6, 3, 0, 8, (other, Draw(7, 1)), 0, ())), (), 13))
        assert arrays.drawn == [2, 0, 0, 0, 0, 3, 1]
        assert arrays.draw_rows.tolist() == [0, 1, 2, 3, 4, 12, 12]
        assert arrays.draw_lengths.tolist() == [8, 21, 22, 23, 24, 8, 8]

    def test_drafts_take_only_tokens_that_nobody_else_wants(self) -> None:
        of = scheduler(draws=4, budget=5)
        for name in "abc":
            of.add(request(name, 2))
        while any(not sequence.outputs for sequence in map(of.sequence, range(3)) if sequence is not None):
            plan = planned(of)
            of.complete(plan, [7] * len(plan.draws))
        plan = planned(of)
        assert (plan.tokens, sorted(chunk.count for chunk in plan.chunks)) == (5, [1, 1, 3])

    def test_none_goes_beyond_what_was_asked_for(self) -> None:
        of = scheduler(draws=4)
        running(of, max_tokens=3)
        plan = planned(of)
        assert spans(plan) == [(6, 2, 2)]
        assert [update.finish_reason for update in of.complete(plan, [7, 7])] == ["length"]

    def test_none_where_later_rows_would_need_masks(self) -> None:
        of, words = scheduler(draws=4), ((5, 6),)
        (sequence,) = of.add(Request("a", (3, 4, 5), SamplingParams(max_tokens=9), bad_words=words))
        of.complete(planned(of), [7])
        assert spans(planned(of)) == [(3, 1, 1)]
        assert sequence.drafted == 0

    def test_none_takes_a_page_that_another_could_want(self) -> None:
        of = scheduler(draws=4, pages=3)
        running(of, prompt=8, max_tokens=3)
        assert spans(planned(of)) == [(8, 1, 1)], "two pages are full, and one is left for the next id"


class TestAcceptance:
    def test_who_may_need_no_page_waits_to_know_instead_of_taking_one(self) -> None:
        of = scheduler(draws=2, pages=5)
        sequences = [of.add(request(name, 6, arrival=at, max_tokens=6))[0] for name, at in (("a", 0.0), ("b", 1.0))]
        of.complete(planned(of), [7, 7])
        first = planned(of)
        assert spans(first) == [(6, 2, 2), (6, 2, 2)]
        second = planned(of)
        assert spans(second) == [(8, 1, 1)], "the last page is taken for the first of them"
        of.complete(first, [7, 7, 7, REJECTED])
        assert spans(planned(of)) == [(7, 1, 1), (9, 2, 2)]
        assert [sequence.preemptions for sequence in sequences] == [0, 0]

    def test_a_row_without_an_id_ends_the_request(self) -> None:
        of = scheduler(draws=4)
        sequence = running(of)
        updates = of.complete(planned(of), [7, -1, REJECTED, REJECTED])
        assert updates == [Update(sequence, [7], None), Update(sequence, [], "error")]
        of.check()
        assert not of.has_work


class TestFixedStates:
    def test_a_rejected_draft_takes_it_back_to_the_state_before(self) -> None:
        rows = Snapshots(9, 4, 4)
        of = scheduler(draws=3, snapshots=rows)
        sequence = running(of)
        first = planned(of)
        ((slot, row),) = first.states_before
        assert (slot, spans(first)) == (sequence.slot, [(6, 3, 3)])
        assert of.schedule() is None, "from which state it goes on is not known"
        of.complete(first, [11, 12, REJECTED])
        again = planned(of)
        assert (again.states_before, spans(again)) == (((row, slot),), [(6, 3, 1)])
        of.complete(again, [13])
        whole = planned(of)
        of.complete(whole, [14, 15, 16])
        assert spans(planned(of)) == [(12, 3, 3)], "all were accepted: it goes on"

    def test_where_a_snapshot_is_due_the_state_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
        of = scheduler(draws=3, snapshots=Snapshots(9, 4, 4))
        running(of, prompt=3)
        seen = []
        for _ in range(4):
            plan = planned(of)
            seen += spans(plan)
            kept = bool(plan.states_after)
            assert kept == (seen[-1][0] + 1 == 8), "a snapshot is taken of what may be rejected"
            of.complete(plan, range(11, 11 + len(plan.draws)))
        assert seen == [(3, 3, 3), (6, 1, 1), (7, 1, 1), (8, 3, 3)]

    def test_without_rows_for_snapshots_there_are_no_drafts(self) -> None:
        of = scheduler(draws=3, snapshots=Snapshots(9, 0, 4))
        running(of)
        assert spans(planned(of)) == [(6, 1, 1)]


class _Scored(SimulatedRunner):
    """Reports an id itself as its log-probability."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        step: Any = super().launch(plan)
        ids = np.array(step.ids)
        step.logprobs = _Scores(ids, np.zeros(len(ids)), np.zeros((len(ids), 0)), np.zeros((len(ids), 0)))
        return step  # type: ignore[no-any-return]


class _Scores:
    def __init__(self, chosen: Any, ranks: Any, top_ids: Any, top: Any) -> None:
        self.chosen, self.ranks, self.top_ids, self.top = chosen, ranks, top_ids, top


def test_callers_get_all_ids_up_to_a_stop_and_what_was_told_of_each() -> None:
    device, ledger = Device(4, right=0.9), None
    runner, pages = _Scored(device, linear), PageAllocator(60, 4)
    of = Scheduler(SchedulerConfig(8, 32, LONGEST, draws=4), pages, PrefixTree(pages))
    loop = EngineLoop(of, runner, True, ledger, clock=lambda: runner.now)  # type: ignore[arg-type]
    delivery = Delivery(loop)
    params = SamplingParams(n=3, max_tokens=20, logprobs=0, ignore_eos=True, detokenize=False)
    collectors = [Collector(Request(f"{i}", (3, 4, i), params), None, None, loop.clock) for i in range(5)]
    delivery.add(collectors, [None] * 5)
    for id in range(100):
        sequence = of.sequence(id)
        if sequence is not None:
            device.asked[id] = (sequence.index, sequence.extra_key)
    for collector in collectors:
        while not collector.finished:
            delivery.step(collector)
    assert len(runner.steps) < 20
    for collector in collectors:
        for output in collector.output().outputs:
            assert output.token_ids == uncrowded(collector.request, output.index, LONGEST)[0]
            assert output.logprobs is not None
            assert [one[id].logprob for one, id in zip(output.logprobs, output.token_ids, strict=True)] == (
                output.token_ids
            )
