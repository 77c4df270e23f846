"""Keys on pages that several sequences read: how many there are in plans, and what decodes over them take."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import msgspec
import pytest

from strata.cache.pages import NONE_SHARED, PageAllocator, SharedKeys
from strata.cache.prefix import PrefixTree
from strata.cost.step_model import StepModel
from strata.engine.plan import Chunk, Draw, StepPlan
from strata.engine.request import Request
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.hardware.specs import device
from strata.plan.simulate.fleet import Fleet, FleetConfig
from strata.plan.simulate.host import SERVER
from strata.plan.simulate.prices import PredictedPrices
from strata.plan.simulate.replica import EngineShape
from strata.plan.simulate.request import SimulatedRequest, exactly

PAGE = 16
# Of 0.6B, all layers: 8 heads of 128 keys and as many values, in 2 bytes.
LAYERS, KEY_BYTES = 28, 2 * 8 * 128 * 2
# What a key takes less from the L2 cache, at twice the bandwidth with which decodes read memory.
SAVED = LAYERS * KEY_BYTES * (1 / 4.53e12 - 1 / 9.06e12)


class Tables:
    """The block tables of all slots, as a runner knows them from the plans alone."""

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}

    def shared(self, plan: StepPlan) -> SharedKeys:
        for slot in plan.ended:
            self._pages.pop(slot, None)
        for chunk in plan.chunks:
            table = self._pages.setdefault(chunk.slot, [])
            table[chunk.first_page :] = chunk.new_pages or table[chunk.first_page :]
        counts = [count for count in Counter(chain(*self._pages.values())).values() if count > 1]
        return SharedKeys(PAGE * len(counts), PAGE * (sum(counts) - len(counts)))


def scheduler(max_sequences: int = 8, stages: int = 1) -> Scheduler:
    pages = PageAllocator(400, PAGE)
    config = SchedulerConfig(max_sequences, max_tokens=256, max_length=400, stages=stages)
    return Scheduler(config, pages, PrefixTree(pages))


def run(engine: Scheduler, prompts: dict[str, list[int]], outputs: int = 50) -> StepPlan:
    """The prompts come; the plan of the first step in which all that run decode."""
    for name, prompt in prompts.items():
        engine.add(Request(name, tuple(prompt), exactly(outputs)))
    while True:
        plan = engine.schedule()
        assert plan is not None
        engine.complete(plan, [1] * len(plan.draws))
        if plan.tokens == len(plan.chunks) == engine.running:
            return plan


def test_a_plan_tells_which_keys_its_sequences_share() -> None:
    """40 tokens that begin four prompts: two full pages, which the last three find, each of them once more."""
    engine, common = scheduler(), list(range(100, 140))
    assert run(engine, {"first": [*common, 1, 2, 3]}).shared == NONE_SHARED
    others = {f"{number}": [*common, number, 7] for number in range(3)}
    plan = run(engine, others)
    assert len(plan.chunks) == 4
    assert plan.shared == SharedKeys(32, 3 * 32)
    assert engine.decode_runs.shared == plan.shared
    engine.abort("1")
    assert run(engine, {"other": [*range(200, 260)]}).shared == SharedKeys(32, 2 * 32)
    engine.abort("first")
    engine.abort("0")
    assert run(engine, {}).shared == NONE_SHARED  # one of the four is left


def test_of_stages_no_step_tells_what_sequences_of_other_steps_share() -> None:
    engine, common = scheduler(stages=2), list(range(100, 140))
    for name in ("first", "second"):
        engine.add(Request(name, (*common, 7), exactly(9)))
        plan = engine.schedule()
        assert plan is not None
        engine.complete(plan, [1] * len(plan.draws))
    assert engine.decode_runs.shared.repeated
    for _ in range(3):
        plan = engine.schedule()
        assert plan is not None
        assert plan.shared == NONE_SHARED
        engine.complete(plan, [1] * len(plan.draws))


def test_plans_tell_of_the_pages_of_their_block_tables() -> None:
    """Requests of three prefixes that come, and end after some tokens, in no order."""
    source, engine, tables = random.Random(5), scheduler(12), Tables()
    common = [source.choices(range(1, 999), k=length) for length in (16, 55, 160)]
    seen, name = Counter[bool](), 0
    for _ in range(400):
        if source.random() < 0.3:
            prompt = source.choice(common) + source.choices(range(1, 999), k=source.randint(1, 60))
            engine.add(Request(str(name := name + 1), tuple(prompt), exactly(source.randint(2, 60))))
        plan = engine.schedule()
        if plan is None:
            continue
        assert plan.shared == tables.shared(plan)
        seen[plan.shared.repeated > 100] += 1
        engine.complete(plan, [1] * len(plan.draws))
    assert seen[True] > 50
    assert seen[False] > 20


def plan(decodes: list[int], *prompts: tuple[int, int]) -> StepPlan:
    """decodes: tokens before each. prompts: (first token, tokens) of each."""
    shares = [(start, 1) for start in decodes] + list(prompts)
    chunks = tuple(Chunk(at, at, *share, (Draw(at, at),), 0, ()) for at, share in enumerate(shares))
    return StepPlan((), (), chunks, (), sum(count for _, count in shares))


def saved(times: StepModel, step: StepPlan, shared: SharedKeys) -> float:
    prices = PredictedPrices(times)
    (seconds, size), (less, same) = prices.price(step), prices.price(msgspec.structs.replace(step, shared=shared))
    assert size == same
    return seconds - less


def test_repeated_keys_come_from_the_cache(times: StepModel) -> None:
    decodes, shared = [1200] * 64, SharedKeys(8 * 1024, 56 * 1024)
    assert saved(times, plan(decodes), NONE_SHARED) == 0
    assert saved(times, plan(decodes), shared) == pytest.approx(56 * 1024 * SAVED, rel=1e-6)
    line, less = (PredictedPrices(times).decodes(64, 64 * 1201, one) for one in (NONE_SHARED, shared))
    assert less == line._replace(base=pytest.approx(line.base - 56 * 1024 * SAVED, rel=1e-6))
    # Two prompts have 1,024 tokens each behind them, which they share with decodes.
    mixed = plan(decodes, (1024, 100), (1024, 60))
    assert saved(times, mixed, SharedKeys(8 * 1024, 58 * 1024)) == pytest.approx(56 * 1024 * SAVED, rel=1e-6)
    assert saved(times, plan([], (1024, 100), (1024, 60)), SharedKeys(1024, 1024)) == 0


def test_a_step_is_never_faster_than_by_the_keys_that_it_must_read(times: StepModel) -> None:
    """All keys but those of one sequence are repeated."""
    step = plan([4096] * 256)
    seconds, _ = PredictedPrices(times).price(msgspec.structs.replace(step, shared=SharedKeys(4096, 255 * 4096)))
    nbytes = times.costs.weights + LAYERS * KEY_BYTES * 4096
    assert seconds > nbytes / times.device.ceiling("bandwidth").value
    assert seconds < 0.7 * PredictedPrices(times).price(step)[0]


def test_what_the_cache_does_not_hold_comes_from_memory(times: StepModel) -> None:
    """60 MiB hold 15,360 keys of a layer with their values."""
    decodes = plan([31_000] * 32)
    fits, twice = (saved(times, decodes, SharedKeys(distinct, 200_000)) for distinct in (15_360, 30_720))
    assert fits == pytest.approx(200_000 * SAVED, rel=1e-6)
    assert twice == pytest.approx(fits / 2)


def test_where_nothing_is_known_of_the_cache_nothing_is_saved(times: StepModel) -> None:
    spec = device("h200")
    unknown = replace(spec, figures=tuple(one for one in spec.figures if one.quantity != "l2"))
    assert StepModel(times.model, unknown).saved(1024, 1024) == 0


def test_a_load_with_a_shared_prefix_decodes_faster(times: StepModel) -> None:
    """32 requests behind one that has computed the prefix; the last ends first, so that 33 decode all the while."""
    source = random.Random(2)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.choices(range(1, 50_000), k=count))

    def tpot(prefixes: list[tuple[int, ...]]) -> float:
        requests = [SimulatedRequest(0.0, prefixes[0] + ids(16), 900)]
        requests += [SimulatedRequest(0.1, prefix + ids(64), 200) for prefix in prefixes[1:-1]]
        requests.append(SimulatedRequest(0.1, prefixes[-1] + ids(64), 50))
        shape = EngineShape(SchedulerConfig(64, max_tokens=8192, max_length=4096), 4000, PAGE, caches=True)
        fleet = Fleet(FleetConfig(shape, 1), PredictedPrices(times), SERVER, requests)
        fleet.run()
        return (fleet.outcomes.last[32] - fleet.outcomes.first[32]) / 49

    common = ids(1024)
    alone, shared = tpot([ids(1024) for _ in range(33)]), tpot([common] * 33)
    assert alone - shared == pytest.approx(32 * 1024 * SAVED, rel=0.03)
    assert shared < 0.85 * alone
