"""Plans for the stages of a pipeline, and for ranks with sequences of their own."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import islice

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import RankPlans, StepPlan
from strata.engine.request import Request, Sequence
from strata.engine.routing.router import BLOCK_TOKENS
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.rank_schedulers import RankSchedulers
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.simulated import EOS, STOP_ID, VOCABULARY, Device, uncrowded


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
            told += sum(len(held.preempted) for held in of.take_waiting())
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


PAGE = 4


class Engine:
    """The schedulers with a device for each rank, one step ahead."""

    def __init__(self, ranks: int, pages: int, config: SchedulerConfig) -> None:
        self.scheduler = RankSchedulers(config, pages, PAGE, caches=True)
        self.devices = [Device(PAGE) for _ in range(ranks)]
        self.outstanding: tuple[RankPlans, list[int]] | None = None
        self.largest: Counter[int] = Counter()

    def add(self, asking: Request) -> list[Sequence]:
        sequences = self.scheduler.add(asking)
        rank = self.scheduler.rank_of(asking.id)
        assert rank is not None
        for sequence in sequences:
            assert sequence.id % len(self.devices) == rank
            self.devices[rank].asked[sequence.id] = (sequence.index, sequence.extra_key)
        return sequences

    def step(self) -> None:
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            assert plan.tokens == sum(part.tokens for part in plan.parts)
            assert plan.draws == [draw for part in plan.parts for draw in part.draws]
            self.largest.update({rank: part.tokens for rank, part in enumerate(plan.parts)})
            ids = [id for device, part in zip(self.devices, plan.parts, strict=True) for id in device.launch(part)]
            launched = plan, ids
        if self.outstanding is not None:
            before, ids = self.outstanding
            left = iter(ids)
            for device, part in zip(self.devices, before.parts, strict=True):
                device.learnt(part, [*islice(left, len(part.draws))])
            self.scheduler.complete(before, ids)
        self.outstanding = launched
        self.scheduler.check()

    def drain(self) -> None:
        while self.scheduler.has_work or self.outstanding is not None:
            self.step()


def asking(id: str, prompt: list[int], **params: object) -> Request:
    asked = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "detokenize": False} | params)  # type: ignore[arg-type]
    return Request(id, tuple(prompt), asked, eos_ids=frozenset({EOS}))


def config(ranks: int, sequences: int = 4, tokens: int = 16, length: int = 40) -> SchedulerConfig:
    return SchedulerConfig(sequences, tokens, length, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("seed", "draws"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_random_loads_on_every_rank(seed: int, draws: int, ranks: int) -> None:
    """With few pages, so that sequences are preempted; some requests are aborted. draws: see `SchedulerConfig`."""
    choices = random.Random(f"{seed} {ranks}")
    engine = Engine(ranks, 9, replace(config(ranks), draws=draws))
    asked: dict[str, tuple[Request, list[Sequence]]] = {}
    aborted = set()
    bases = [[choices.randrange(2, VOCABULARY) for _ in range(9)] for _ in range(3)]
    for number in range(30):
        prompt = choices.choice(bases)[: choices.randrange(10)]
        prompt += [choices.randrange(2, VOCABULARY) for _ in range(choices.randrange(1, 8))]
        one = asking(
            str(number),
            prompt,
            n=choices.choice([1, 1, 3]),
            max_tokens=choices.randrange(1, 16),
            stop_token_ids=[STOP_ID],
        )
        asked[one.id] = one, engine.add(one)
        for _ in range(choices.randrange(3)):
            engine.step()
        if choices.random() < 0.15:
            victim = choices.choice(list(asked))
            if engine.scheduler.abort(victim):
                aborted.add(victim)
            assert engine.scheduler.rank_of(victim) is None
    engine.drain()
    for id, (one, sequences) in asked.items():
        for sequence in sequences:
            outputs, reason, stop = uncrowded(one, sequence.index, 40)
            if id in aborted:
                assert sequence.outputs == outputs[: len(sequence.outputs)]
            else:
                assert (sequence.outputs, sequence.finish_reason, sequence.stop_reason) == (outputs, reason, stop)
    assert engine.scheduler.pages.usage == 0
    assert set(engine.largest) == set(range(ranks))
    statistics = engine.scheduler.statistics
    assert statistics.prefix_hits > 0
    assert statistics.preemptions > 0 or ranks > 1


def test_requests_spread_over_ranks_and_follow_their_prefixes() -> None:
    engine = Engine(4, 200, config(4, tokens=400, length=400))
    scheduler = engine.scheduler

    def rank_of(id: str, prompt: list[int]) -> int | None:
        engine.add(asking(id, prompt))
        return scheduler.rank_of(id)

    first = {rank_of(str(number), [2 + number] * 100) for number in range(4)}
    assert first == {0, 1, 2, 3}
    assert (scheduler.waiting, scheduler.max_sequences) == (4, 16)
    engine.drain()
    held = dict(enumerate([2 + one] * (BLOCK_TOKENS + 1) for one in range(4)))
    for number, prefix in held.items():
        before = scheduler.statistics.prefix_hits
        assert rank_of(f"again {number}", [*prefix, 20]) == number
        engine.drain()
        assert scheduler.statistics.prefix_hits == before + BLOCK_TOKENS
    # A prefix does not hold back what another rank could begin at once.
    following = [rank_of(f"many {number}", [*held[0], 5 + number]) for number in range(8)]
    assert Counter(following) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_what_a_loop_asks_of_one_scheduler() -> None:
    engine = Engine(2, 20, config(2))
    scheduler = engine.scheduler
    scheduler.config = SchedulerConfig(4, 16, 40, seed=3, target=None, ranks=2)
    one, other = (
        engine.add(asking("one", [5, 6, 7])),
        engine.add(asking("other", [7, 8], n=2)),
    )
    assert {sequence.id % 2 for sequence in one} != {sequence.id % 2 for sequence in other}
    assert scheduler.sequence(other[1].id) is other[1]
    with pytest.raises(ValueError, match="request id 'one' is in use"):
        scheduler.add(asking("one", [5]))
    with pytest.raises(ValueError, match="max_model_len is 40"):
        scheduler.add(asking("long", [5] * 50))
    assert scheduler.has_space
    assert scheduler.waiting_tokens == 3 + 2
    engine.step()
    assert scheduler.waiting_tokens == 0
    assert scheduler.running == 3
    scheduler.finish(one[0], "stop", "text")
    assert scheduler.rank_of("one") is None
    assert scheduler.fail(other[0]) != []
    assert not scheduler.has_work
    engine.add(asking("left", [9]))
    scheduler.reset()
    assert not scheduler.has_work
    assert scheduler.pages.usage == 0
    scheduler.check()
