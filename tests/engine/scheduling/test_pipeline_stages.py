"""Plans for the stages of a pipeline, of which several are under way at once."""

from __future__ import annotations

import random
from collections import deque

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler


def scheduler(stages: int, pages: int = 400, budget: int = 64) -> Scheduler:
    allocator = PageAllocator(pages, 4)
    return Scheduler(SchedulerConfig(8, budget, 100, stages=stages), allocator, PrefixTree(allocator))


def request(id: str, prompt: int, outputs: int, **params: object) -> Request:
    first = 1000 * int(id)
    sampling = SamplingParams(max_tokens=outputs, ignore_eos=True, **params)  # type: ignore[arg-type]
    return Request(id, tuple(range(first, first + prompt)), sampling, arrival=float(id))


def run(of: Scheduler, stages: int) -> list[StepPlan]:
    """Steps until all have ended, with as many under way as there are stages. The id of a sequence is that of its
    place, so that nobody's depends on the plans. Who is preempted is told with a plan, if with a later one."""
    under_way: deque[StepPlan] = deque()
    plans: list[StepPlan] = []
    told, before = 0, of.statistics.preemptions
    while of.has_work:
        plan = of.schedule() if len(under_way) < stages else None
        if plan is not None:
            drawn = {draw.sequence for one in under_way for draw in one.draws}
            assert drawn.isdisjoint(chunk.sequence for chunk in plan.chunks), "its id is under way"
            under_way.append(plan)
            plans.append(plan)
            told += sum(len(held.preempted) for held in of.take_held())
        else:
            assert under_way, "nothing is under way, and nothing can be"
            oldest = under_way.popleft()
            found = [of.sequence(draw.sequence) for draw in oldest.draws]
            of.complete(oldest, [len(one.tokens) if one is not None else 0 for one in found])
        of.check()
    assert told == of.statistics.preemptions - before
    return plans


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_decode_for_equal_shares(stages: int) -> None:
    of = scheduler(stages)
    for number in range(8):
        of.add(request(str(number), 4, 12))
    decoding = [plan for plan in run(of, stages) if all(chunk.count == 1 for chunk in plan.chunks)]
    sizes = [len(plan.chunks) for plan in decoding[: 8 * stages]]
    assert max(sizes) <= -(-8 // stages)
    assert sum(sizes[:stages]) == 8, "all stages together decode for all sequences"
    assert min(sizes[: 4 * stages]) >= 8 // stages - (8 % stages > 0)


def test_a_prompt_goes_on_while_its_chunks_are_under_way() -> None:
    of = scheduler(3, budget=8)
    of.add(request("0", 20, 1))
    plans = [of.schedule() for _ in range(3)]
    assert [[(chunk.start, chunk.count) for chunk in plan.chunks] for plan in plans if plan is not None] == [
        [(0, 8)],
        [(8, 8)],
        [(16, 4)],
    ]


@pytest.mark.parametrize("pages", [400, 30])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_request_gets_all_its_ids(stages: int, pages: int) -> None:
    """With few pages they are preempted while their ids are under way."""
    chance = random.Random(stages)
    of, preemptions = scheduler(stages, pages, budget=16), 0
    for _ in range(10):
        added = []
        for number in range(12):
            lengths = chance.randint(1, 30), chance.randint(1, 30)
            added += [(one, lengths) for one in of.add(request(str(number), *lengths, n=chance.choice([1, 1, 2])))]
        run(of, stages)
        for sequence, (prompt, outputs) in added:
            assert sequence.outputs == list(range(prompt, prompt + outputs))
            assert sequence.finish_reason == "length"
        preemptions = of.statistics.preemptions
    assert bool(preemptions) == (pages == 30)


def test_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        scheduler(0)
