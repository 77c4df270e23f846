"""A scheduler for each rank: requests spread and follow their prefixes, and every device gets the right plans."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from strata.engine.plan import RankPlans
from strata.engine.request import Request, Sequence
from strata.engine.routing.held_prefixes import BLOCK_TOKENS
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.rank_schedulers import RankSchedulers
from tests.engine.simulated import EOS, STOP_ID, VOCABULARY, Device, uncrowded

PAGE = 4


class Engine:
    """The schedulers with a device for each rank, one step ahead."""

    def __init__(self, ranks: int, pages: int, config: SchedulerConfig) -> None:
        self.scheduler = RankSchedulers(config, pages, PAGE, caches=True)
        self.devices = [Device(PAGE) for _ in range(ranks)]
        self.outstanding: tuple[RankPlans, list[int]] | None = None
        self.largest: Counter[int] = Counter()

    def add(self, request: Request) -> list[Sequence]:
        sequences = self.scheduler.add(request)
        rank = self.scheduler.rank_of(request.id)
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


def request(id: str, prompt: list[int], **params: object) -> Request:
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
        one = request(
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
        engine.add(request(id, prompt))
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
    one, other = engine.add(request("one", [5, 6, 7])), engine.add(request("other", [7, 8], n=2))
    assert {sequence.id % 2 for sequence in one} != {sequence.id % 2 for sequence in other}
    assert scheduler.sequence(other[1].id) is other[1]
    with pytest.raises(ValueError, match="request id 'one' is in use"):
        scheduler.add(request("one", [5]))
    with pytest.raises(ValueError, match="max_model_len is 40"):
        scheduler.add(request("long", [5] * 50))
    assert scheduler.has_room
    assert scheduler.waiting_tokens == 3 + 2
    engine.step()
    assert scheduler.waiting_tokens == 0
    assert scheduler.running == 3
    scheduler.finish(one[0], "stop", "text")
    assert scheduler.rank_of("one") is None
    assert scheduler.fail(other[0]) != []
    assert not scheduler.has_work
    engine.add(request("left", [9]))
    scheduler.reset()
    assert not scheduler.has_work
    assert scheduler.pages.usage == 0
    scheduler.check()
