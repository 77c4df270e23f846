"""What a step program chooses: of random engines and steps the smallest CUDA graph that holds them, by a plain search,
and the variant that is for them; the planner, which has no plan of a step, chooses the same."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from strata.cache.tables import BufferShape
from strata.comm.symmetric import imagined
from strata.engine.plan import Chunk, Draw, PlanArrays, StepPlan
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import LIBRARY_KEYS, LIBRARY_TOKENS
from strata.engine.ranks.step_room import StepRoom
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.attention.virtual_sequences import fresh_rows
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
from strata.plan.meta_model import find_config, meta_model

pytest.importorskip("triton")

# A model, ranks that divide matrices, and what else an engine is asked for.
ENGINES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("8B", 1, {}),
    "mixture": ("30B-A3B", 1, {}),
    "latent": ("V2-Lite", 1, {}),
    "windows": ("gpt-oss-20b", 1, {}),
    "recurrent": ("80B-A3B", 1, {}),
    "deterministic": ("0.6B", 1, {"deterministic": True}),
    "int4": ("8B", 1, {"quantization": "int4"}),
    "fp8": ("8B", 1, {"quantization": "fp8"}),
    "8-bit messages": ("8B", 2, {"message_dtype": "fp8"}),
    "messages beside products": ("70B", 2, {}),
    "experts over ranks": ("30B-A3B", 4, {}),
    "stages": ("8B", 1, {}),
    "divided tokens": ("0.6B", 1, {}),
}


@cache
def made(name: str) -> MetaModel:
    shape, ranks, options = ENGINES[name]
    config = find_config(shape)
    config = config.with_layers(tuple(range(4)))
    shard = context = None
    if ranks > 1:
        apart = name == "experts over ranks"
        own: dict[str, Any] = {"expert_parallel": apart, "own_tokens": apart}
        shard = RankShard.of(config, ranks, 0, imagined(TENSOR_AXIS, ranks), **own)
    if name == "stages":
        shard = RankShard.of(config, 1, 0, stages=4, stage=3)
    if name == "divided tokens":
        context = imagined("cp", 2)
    return meta_model(config, device("h200"), shard=shard, context=context, **options)


def engine(name: str, chance: random.Random) -> MetaModel:
    """The same graphs in an engine of other limits."""
    found = made(name)
    return found.of_sizes(
        max_sequences=chance.choice([1, 7, 16, 64, 256, 300, 1024]),
        max_tokens=chance.choice([64, 100, 512, 2048, 8192, 16384]),
        parameters=chance.choice([10**8, 10**9, 8 * 10**9, 7 * 10**10]),
        attends=chance.random() < 0.5,
    )


def workload(model: MetaModel, chance: random.Random) -> Workload:
    """A step that the scheduler of such an engine could make: decodes first, then prompts."""
    sizes = model.sizes
    decodes = chance.choice([0, 0, 1, 2, 8, 63, 64, 65, 300])
    decodes = min(decodes, sizes.max_sequences, sizes.max_tokens)
    left, new = sizes.max_tokens - decodes, []
    for _ in range(min(chance.choice([0, 1, 1, 2, 9, 16, 17]), sizes.max_sequences - decodes)):
        if left > 1:
            new.append(min(left, chance.choice([2, 17, 100, 440, 500, 2047, 2048, 5000, 100_000])))
            left -= new[-1]
    if not decodes and not new:
        decodes = 1
    behind = [chance.choice([0, 0, 30, 6143, 6144, 20_000]) for _ in new]
    before = tuple(count + more for count, more in zip(new, behind, strict=True))
    return Workload((1,) * decodes + tuple(new), tuple(chance.randrange(2, 999) for _ in range(decodes)) + before)


def plan(step: Workload) -> StepPlan:
    chunks = tuple(
        Chunk(slot, slot, total - new, new, (Draw(slot, slot),), 0, ())
        for slot, (new, total) in enumerate(zip(step.new, step.total, strict=True))
    )
    return StepPlan((), (), chunks, (), step.tokens)


def plan_of(step: Workload) -> PlanArrays:
    return PlanArrays(plan(step))


def smallest(sizes: tuple[BufferShape, ...], step: Workload) -> BufferShape | None:
    """By looking at all of them."""
    count, prompts = len(step.new), sum(new > 1 for new in step.new)
    if not prompts:
        decodes = [size for size in sizes if size.tokens == size.sequences >= count]
        return min(decodes, key=lambda size: size.tokens, default=None)
    is_fresh = step.new == step.total
    holding = [
        size
        for size in sizes
        if size.ranks == 1
        and size.tokens != size.sequences
        and size.tokens >= step.tokens
        and size.sequences > count
        and size.draws >= count
        and (size.prompts is None or size.prompts >= prompts)
        and (not size.fresh or (is_fresh and size.tokens >= fresh_rows(step.new)))
    ]
    holding.sort(key=lambda size: (size.tokens, size.sequences, size.prompts is None, not size.fresh))
    behind = max(total - new for new, total in zip(step.new, step.total, strict=True) if new > 1)
    if holding and holding[0].tokens < LIBRARY_TOKENS and behind >= LIBRARY_KEYS:
        by_library = [size for size in holding[1:] if size.prompts is not None and size.tokens <= LIBRARY_TOKENS]
        return (by_library or holding)[0]
    return holding[0] if holding else None


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_takes_the_smallest_graph_that_holds_it(name: str) -> None:
    chance = random.Random(name)
    for _ in range(24):
        model = engine(name, chance)
        for _ in range(12):
            step = workload(model, chance)
            found, told = model.choose(step), model.program.choose(StepShape.of(plan_of(step)))
            assert (found.variant, found.size, found.library) == (told.variant, told.size, told.library)
            if found.shape.share is not None:
                assert found.variant.name == "divided"
                assert found.size is None or (found.size.ranks == 2 and found.size.tokens >= found.shape.share.rows)
                continue
            assert found.size == smallest(model.sizes.recorded, step)
            shape = StepShape.of(plan_of(step))._replace(size=found.size)
            first = next(one for one in model.program.variants if one.when(shape))
            assert found.variant is first
            if found.size is not None and max(step.new) == 1:
                assert found.variant.name.startswith("decode")
            assert found.variant.least <= shape.rows


@pytest.mark.parametrize("name", ["dense", "divided tokens"])
def test_prompts_that_are_scored_are_launched_whole(name: str) -> None:
    program = made(name).program
    shape = StepShape.of(plan_of(Workload((4000,), (4000,))), scored=True)
    choice = program.choose(shape)
    assert (choice.size, choice.variant.name, choice.shape.share) == (None, "logits", None)
    assert program.choose(shape._replace(scored=False)).size is not None


def test_ranks_with_sequences_of_their_own_take_the_size_that_holds_all_of_their_steps() -> None:
    program = made("experts over ranks").program
    few, many = (plan_of(Workload((count,), (count,))) for count in (5, 600))
    room = StepRoom.of([StepPlan((), (), (), (), 0), plan(Workload((600,), (600,)))], scored=False)
    mine, theirs = (program.choose(StepShape.of_ranks(room, step)) for step in (few, many))
    assert mine.size == theirs.size is not None
    assert mine.size.tokens >= 600
    assert mine.variant is theirs.variant
