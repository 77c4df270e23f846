"""What a step program chooses of random engines and steps: the smallest CUDA graph that holds them, by a plain search,
and the variant that is for them, as the planner does, which has no plan of a step; and the sizes there are."""

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
from strata.engine.program.sizes import (
    LIBRARY_KEYS,
    LIBRARY_TOKENS,
    captured_sizes,
    decode_buckets,
    max_mixed_tokens,
    mixed_buckets,
    smallest_mixed,
)
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.attention.query_chunks import pure_prefill_rows
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
        own: dict[str, Any] = {"expert_parallel": apart, "attention_dp": apart}
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
    is_pure_prefill = step.new == step.total
    holding = [
        size
        for size in sizes
        if size.ranks == 1
        and size.tokens != size.sequences
        and size.tokens >= step.tokens
        and size.sequences > count
        and size.draws >= count
        and (size.prompts is None or size.prompts >= prompts)
        and (not size.pure_prefill or (is_pure_prefill and size.tokens >= pure_prefill_rows(step.new)))
    ]
    holding.sort(key=lambda size: (size.tokens, size.sequences, size.prompts is None, not size.pure_prefill))
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
            assert found.size == smallest(model.sizes.captured, step)
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
    plans = [StepPlan((), (), (), (), 0), plan(Workload((600,), (600,)))]
    room = StepShape.of_ranks(plans, scored=False, tagged=False)
    mine, theirs = (program.choose(room._replace(step=step)) for step in (few, many))
    assert mine.size == theirs.size is not None
    assert mine.size.tokens >= 600
    assert mine.variant is theirs.variant


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("most", [256, 512, 1024, 2048])
def test_every_size_holds_what_it_promises_and_wastes_little(most: int, library: bool) -> None:
    longest = max_mixed_tokens(600 * 10**6, library)  # of the 0.6B shape
    sizes = mixed_buckets(most, longest, library)
    assert sizes == sorted(set(sizes), key=lambda size: (size.tokens, size.sequences, size.prompts is None))
    assert len(sizes) < (75 if most == 256 else 90)  # each takes memory and start-up time
    for tokens in (*range(2, 1100), *range(1100, longest, 7), longest):
        for sequences in {min(count, most, tokens - 1) for count in (1, 16, 64, 256, 1024, most)}:
            for prompts in {1, min(16, sequences), min(17, sequences), sequences}:
                size = smallest_mixed(sizes, StepShape(tokens, sequences, sequences, prompts))
                assert size is not None
                assert size.tokens >= tokens
                assert size.sequences > sequences  # padding finds a sequence to belong to
                assert size.sequences < size.tokens  # and no size is taken for one of decodes
                assert size.prompts is None or prompts <= size.prompts
                if tokens > max(256, 2 * sequences):
                    assert size.tokens <= (1.25 if prompts <= 16 or not library else 1.5) * tokens
                if library and tokens >= 448 and prompts <= 16:
                    assert size.prompts == 16
    assert smallest_mixed(sizes, StepShape(longest + 1, 1, 1, 1)) is None
    assert smallest_mixed(sizes, StepShape(600, 100, most + 1, 1)) is None


def test_several_numbers_of_sequences_are_told_apart_where_padding_costs_most() -> None:
    def told_apart(most: int, tokens: int) -> list[int]:
        return [size.draws for size in mixed_buckets(most, 8192, False) if size.tokens == tokens]

    for most, short, middle, long in (
        (8, [8], [8], [8]),
        (64, [16, 64], [16, 64], [16, 64]),
        (256, [16, 64, 256], [64, 256], [64, 256]),
        (1024, [16, 64, 256], [64, 256, 1024], [256, 1024]),
        (2048, [16, 64, 256], [256, 1024, 2048], [1024, 2048]),
    ):
        assert [told_apart(most, tokens) for tokens in (640, 3072, 3584)] == [short, middle, long]


@pytest.mark.parametrize("most", [1, 8, 16, 24])
def test_engines_of_few_sequences_have_as_many_lengths_of_steps(most: int) -> None:
    many, few = ({size.tokens for size in mixed_buckets(count, 8192, True)} for count in (256, most))
    assert few == many


def test_short_steps_behind_many_keys_are_padded_to_the_shortest_for_the_library() -> None:
    def size(tokens: int, behind: int, sequences: int = 5, prompts: int = 1, library: bool = True) -> BufferShape:
        sizes = mixed_buckets(256, 8192, library, pure_prefill=library)
        found = smallest_mixed(sizes, StepShape(tokens, sequences, sequences, prompts, behind=behind))
        assert found is not None
        assert found.tokens >= tokens
        assert found.sequences > sequences
        return found

    for tokens in (33, 100, 256, 384):
        assert size(tokens, 6143).prompts is None
        padded = size(tokens, 6144)
        assert (padded.tokens, padded.prompts) == (448, 16)
        for alike in ((6144, 5, 17), (1 << 20, 5, 17), (6144, 5, 1, False)):  # more prompts than it takes, or none
            assert size(tokens, *alike) == size(tokens, 0, *alike[1:])
    assert size(256, 9999, 100).sequences == 257  # the fewest sequences that suffice there, too
    for tokens in (448, 500, 3000, 8192):
        assert size(tokens, 1 << 20) == size(tokens, 0)


def test_pure_prefill_steps_have_few_sizes_beside_those_of_others() -> None:
    others, sizes = (mixed_buckets(256, 8192, True, own) for own in (False, True))
    assert [size for size in sizes if not size.pure_prefill] == others
    own = [size for size in sizes if size.pure_prefill]
    assert len(own) == 9
    assert {(size.sequences, size.draws, size.prompts) for size in own} == {(17, 16, 16)}
    assert sizes == sorted(sizes, key=lambda size: (size.tokens, size.sequences, size.prompts is None))
    for new in ((8192,), (2048,) * 4, (512,) * 16, (1, 3900), (300, 5000), (2000,)):
        shape = StepShape(sum(new), len(new), len(new), len(new))
        wanted = smallest_mixed(others, shape)
        found = smallest_mixed(sizes, shape._replace(pure_prefill_rows=pure_prefill_rows(new)))
        assert found is not None
        assert wanted is not None
        assert found.pure_prefill
        assert found.tokens == wanted.tokens
        assert smallest_mixed(sizes, shape) == wanted
    assert not smallest_mixed(
        sizes, StepShape(8192, 2, 2, 2, pure_prefill_rows=pure_prefill_rows((8191, 1)))
    ).pure_prefill
    assert not smallest_mixed(
        sizes, StepShape(4000, 17, 17, 17, pure_prefill_rows=pure_prefill_rows((234,) * 17))
    ).pure_prefill
    assert not any(size.pure_prefill for size in captured_sizes(256, 8192, 10**9, library=False, pure_prefill=False))


def test_steps_are_recorded_while_they_are_short_for_their_model_or_the_library_attends() -> None:
    models = (10**6, 600 * 10**6, 8 * 10**9)
    assert [max_mixed_tokens(parameters, False) for parameters in models] == [3_499_520, 5632, 2048]
    assert [max_mixed_tokens(parameters, True) for parameters in models] == [3_499_520, 8192, 8192]
    for library, longest in ((False, 2048), (True, 8192)):
        sizes = captured_sizes(256, 8192, 8 * 10**9, library)
        assert max(size.tokens for size in sizes) == longest
        assert library == any(size.prompts is not None for size in sizes)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("longest", [77, 300, 2000, 2048, 5000])
def test_the_largest_step_is_recorded(longest: int, library: bool) -> None:
    for most in (16, 100):
        sizes = mixed_buckets(min(most, longest - 2), longest, library)
        for prompts in (1, min(most, longest - 2)):
            size = smallest_mixed(sizes, StepShape(longest, most - 30, most - 30, prompts))
            assert size is not None
            assert size.tokens == longest


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("most", [1, 31, 32, 33, 200])
def test_no_size_is_larger_than_a_step_may_be(most: int, library: bool) -> None:
    for tokens in (100, 700):
        for size in mixed_buckets(most, tokens, library):
            assert size.tokens <= tokens
            assert size.draws <= most
    assert decode_buckets(most)[-1] == most


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize(("sequences", "tokens"), [(8, 4), (64, 16), (256, 128), (256, 255), (4, 1), (256, 8192)])
def test_steps_of_fewer_tokens_than_sequences_fit_into_their_buffers(
    sequences: int, tokens: int, library: bool
) -> None:
    sizes = captured_sizes(sequences, tokens, 10**9, library)
    largest = BufferShape(tokens, sequences + 1, sequences).size
    assert max(size.size for size in sizes) <= largest
    assert max(size.tokens for size in sizes) == (tokens if library or tokens < 8192 else 3072)
