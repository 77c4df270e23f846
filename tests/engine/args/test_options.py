"""What an engine is given: options by name, and prompts as segments whose positions are ids or content."""

from __future__ import annotations

import inspect
import random
from dataclasses import fields
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata import LLM
from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool, PoolShape
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape, StepBuffer
from strata.engine.args.options import VLLM_OPTIONS
from strata.engine.args.segments import Content, positions
from strata.engine.engine_config import EngineConfig
from strata.engine.plan import PlanArrays, StepPlan, Tags
from strata.engine.request import Request
from strata.engine.routing.router import BLOCK_TOKENS, prefix_keys
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.steps.slots import SlotState
from tests.engine.scheduling.plans import scheduler, shares, step


def test_a_call_is_declared_with_every_option_its_type_and_default() -> None:
    declared = inspect.signature(LLM).parameters
    options = {field.name: field for field in fields(EngineConfig)}
    assert set(declared) == {*options, "verbose"}
    for name in set(options) - {"model"}:
        assert declared[name].default == options[name].default
        assert declared[name].annotation == options[name].type
        assert declared[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_package_says_that_it_has_types() -> None:
    assert files("strata").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_modle_len", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("dtpye", "dtype"),
        ("modle", "model"),
        ("trust_remote_cod", "trust_remote_code"),
    ],
)
def test_a_mistyped_option_is_told_what_was_meant(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"{given}'; did you mean {meant}\?$"):
        LLM("builtin", **{given: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": False, "enforce_eager": True, "swap_space": 4, "disable_log_stats": True},
        {"enforce_eager": False, "tokenizer": None, "revision": None, "enable_chunked_prefill": True},
        {"data_parallel_size": 1, "hf_overrides": {}, "cpu_offload_gb": 0, "distributed_executor_backend": "mp"},
        {
            "limit_mm_per_prompt": {"image": 0},
            "served_model_name": "a",
            "load_format": "safetensors",
            "rope_scaling": None,
        },
    ],
)
def test_options_of_vllm_that_ask_for_nothing_are_taken(options: dict[str, Any]) -> None:
    assert EngineConfig.from_options("8B", {"max_num_seqs": 4, **options}) == EngineConfig("8B", max_num_seqs=4)


@pytest.mark.parametrize("name", [name for name, foreign in VLLM_OPTIONS.items() if foreign.taken is not None])
def test_options_of_vllm_that_ask_for_more_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='something else' is not taken: "):
        EngineConfig.from_options("8B", {name: "something else"})


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16, "device": torch.device("cpu")}, {"dtype": "bfloat16", "device": "cpu"}),
        (
            {"max_model_len": np.int64(64), "gpu_memory_utilization": np.float32(0.5), "deterministic": np.True_},
            {"max_model_len": 64, "gpu_memory_utilization": 0.5, "deterministic": True},
        ),
    ],
)
def test_values_of_vllm_torch_and_numpy_are_those_that_they_stand_for(
    options: dict[str, Any], same: dict[str, Any]
) -> None:
    made = EngineConfig.from_options("8B", options)
    assert made == EngineConfig.from_options("8B", same)
    for name, value in same.items():
        assert type(getattr(made, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "value"), [("model", 5), ("model", ["a"]), ("model", b"a"), ("verbose", "yes"), ("verbose", 1)]
)
def test_a_model_or_verbose_of_another_type_is_refused_in_one_sentence(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be ") as refused:
        LLM(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)


def test_no_option_of_its_own_is_taken_for_one_of_vllm_that_asks_for_nothing() -> None:
    assert not set(VLLM_OPTIONS) & {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "4k"),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("dtype", 16),
        ("dtype", ["float32"]),
        ("kv_cache_dtype", ["fp8"]),
        ("device", 0),
        ("passes", None),
        ("quantization", 4),
        ("sparsity", {}),
        ("seed", "one"),
        ("tpot_target_ms", "20"),
        ("ttft_target_ms", "300"),
        ("sparse_prefill", "half"),
        ("executor", None),
        ("load_format", 0),
        ("message_dtype", None),
        ("decode_pages", 2.5),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_sentence(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        LLM("builtin", **{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_sampling_parameter_of_another_type_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        SamplingParams(**{name: object})  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


CONTENTS = st.builds(Content, st.integers(1, 40), st.binary(max_size=3))
SEGMENTS = st.lists(st.one_of(st.lists(st.integers(0, 9), max_size=5), CONTENTS), max_size=5)


def flat(segments: list[list[int] | Content]) -> list[object]:
    """Each position by what stands there."""
    return [
        place
        for one in segments
        for place in (one if isinstance(one, list) else [(one, at) for at in range(one.positions)])
    ]


@given(SEGMENTS, SEGMENTS)
def test_prompts_agree_as_far_as_their_positions_do(
    one: list[list[int] | Content], other: list[list[int] | Content]
) -> None:
    prompts, places = (positions(one), positions(other)), (flat(one), flat(other))
    assert [len(prompt) for prompt in prompts] == [len(place) for place in places]
    assert [a == b for a, b in zip(*prompts, strict=False)] == [a == b for a, b in zip(*places, strict=False)]
    assert all((number >= 0) == isinstance(place, int) for number, place in zip(prompts[0], places[0], strict=True))


def added(of: Scheduler, id: str, prompt: tuple[int, ...], tags: Tags | None = None) -> int:
    """The tokens that a request finds cached."""
    (sequence,) = of.add(Request(id, prompt, SamplingParams(max_tokens=2), tags=tags))
    while not sequence.finished:
        step(of)
        of.check()
    return sequence.cached_tokens


def test_the_same_content_is_computed_once_and_another_is_not_taken_for_it() -> None:
    of = scheduler(page_size=4, longest=200)
    image, other = Content(10, b"image"), Content(10, b"other")
    assert added(of, "a", positions([[3, 4], image, [5, 6, 7, 8, 9]])) == 0
    assert added(of, "b", positions([[3, 4], image, [5, 6, 7, 8, 9]])) == 16
    assert added(of, "c", positions([[3, 4], image, [1, 2]])) == 12
    assert added(of, "d", positions([[3, 4], other, [5, 6, 7, 8, 9]])) == 0
    assert added(of, "e", positions([[3, 4], Content(9, b"image"), [5, 6, 7, 8, 9]])) == 0


def test_its_positions_fill_steps_and_pages() -> None:
    of = scheduler(page_size=4, budget=8)
    of.add(Request("a", positions([[3], Content(12, b"image"), [4]]), SamplingParams(max_tokens=2)))
    plan = of.schedule()
    assert plan is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert (shares(of, plan), len(plan.chunks[0].new_pages)) == ([("a", 0, 8)], 4)
    of.complete(plan, [])
    assert shares(of, step(of)) == [("a", 8, 6)]
    with pytest.raises(ValueError, match="the prompt has 102 tokens"):
        of.add(Request("b", positions([Content(100, b""), [3, 4]]), SamplingParams()))


def test_routers_tell_it_apart() -> None:
    image, other = (positions([[3] * BLOCK_TOKENS, Content(BLOCK_TOKENS, digest), [4]]) for digest in (b"a", b"b"))
    assert prefix_keys(image) == prefix_keys(list(image))
    assert prefix_keys(image)[1] != prefix_keys(other)[1]
    assert len(prefix_keys(image)) == 2


def test_who_gives_ids_gives_no_content() -> None:
    for prompt in ((3, -5), positions([[3], Content(2, b"image")])):
        with pytest.raises(ValueError, match="is out of range"):
            Request("a", prompt, SamplingParams()).check_ids(100)


def test_sequences_of_other_tags_share_no_prefixes() -> None:
    of, prompt = scheduler(page_size=4), tuple(range(3, 20))
    kinds = [None, Tags(adapter="x"), Tags(draft="x"), Tags(weights="x"), Tags("x", "x")]
    assert [added(of, f"first {number}", prompt, tags) for number, tags in enumerate(kinds)] == [0] * 5
    assert [added(of, f"again {number}", prompt, tags) for number, tags in enumerate(kinds)] == [16] * 5
    assert added(of, "none", prompt, Tags()) == 16, "tags that say nothing are none"


def tag_rows(slots: SlotState, plan: StepPlan) -> list[list[int]] | None:
    """Of each chunk of a step, as the model is given them."""
    slots.learn(plan)
    arrays, tagged = PlanArrays(plan), slots.tags_any(plan)
    shape = BufferShape(plan.tokens + 2, len(plan.chunks) + 1, len(arrays.drawn), tags=tagged)
    assert tagged or shape == BufferShape(*(getattr(shape, name) for name in ("tokens", "sequences", "draws")))
    staging, cpu = Staging(shape.size, torch.device("cpu")), torch.device("cpu")
    buffer, tables = StepBuffer(shape, staging, staging.target(shape.size)), BlockTables(8, 32, cpu)
    buffer.place(tables, 4, arrays.slots, arrays.starts, arrays.counts)
    if tagged:
        slots.place_tags(buffer.host, arrays.slots)
    pool = KVPool(PoolShape(0, 4, 1, 8, torch.float32), 1, cpu)
    tags = buffer.batch(pool, tables.on_device, buffer.tensors["tokens"], 1, ()).tags
    if tags is None:
        return None
    assert tags.shape == (len(plan.chunks) + 1, 2)
    assert not tags[-1].any(), "padding has no tags"
    return tags[:-1].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_step_finds_the_rows_of_what_its_sequences_bring_along(seed: int) -> None:
    """Whoever brings the same has one row, low ones are taken again; steps without tags are as if there were none."""
    chosen = random.Random(seed)
    of, slots = scheduler(budget=16), SlotState(8)
    kinds = [None, Tags(), Tags(draft="d"), *(Tags(adapter=one, weights=two) for one in ("", "a", "b") for two in "12")]
    brought: dict[int, Tags | None] = {}
    seen: set[bool] = set()
    waiting = [chosen.choice(kinds[:3] if number > 20 else kinds) for number in range(40)]
    while waiting or of.has_work:
        for _ in range(chosen.randrange(3) if of.has_work else 1):
            if waiting:
                params = SamplingParams(max_tokens=chosen.randint(1, 6))
                prompt = tuple(range(3, chosen.randint(4, 24)))
                (sequence,) = of.add(Request(f"{len(waiting)}", prompt, params, tags=waiting[-1]))
                brought[sequence.id] = waiting.pop()
        plan = of.schedule()
        assert plan is not None
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        rows, tags = tag_rows(slots, sent), [brought[chunk.sequence] or Tags() for chunk in plan.chunks]
        seen.add(rows is None)
        if rows is None:
            assert not any(one.adapter or one.weights for one in tags)
        else:
            for at, names in enumerate(([one.adapter for one in tags], [one.weights for one in tags])):
                column = [row[at] for row in rows]
                assert [row == 0 for row in column] == [not name for name in names]
                assert len(set(zip(names, column, strict=True))) == len(set(names)) == len(set(column))
                assert max(column) <= 2, "two adapters, and two versions, never need a third row"
        of.complete(plan, [7] * len(plan.draws))
    assert seen == {True, False}


def test_the_model_is_given_the_tags_of_a_step() -> None:
    """And computes the same where nothing of it asks for them."""
    engine = LLM("builtin", device="cpu", num_pages=64, max_num_seqs=4, verbose=False).engine
    given: list[Any] = []
    for variant in engine.program.variants:
        forward = variant.graph.forward
        variant.graph.forward = lambda batch, *rest, forward=forward: given.append(batch) or forward(batch, *rest)
    found = []
    for kinds in ([None] * 3, [None, Tags("a", weights="1"), Tags("b")]):
        params, prompts = SamplingParams(temperature=0, max_tokens=4), ((5, 6, 7), (8,) * 20, (9, 4))
        for number, (prompt, tags) in enumerate(zip(prompts, kinds, strict=True)):
            engine.loop.add(Request(f"{number}", prompt, params, tags=tags, salt=f"{kinds}"))
        found.append([[update.tokens for update in output.updates] for output in engine.loop.outputs()])
        told = [None if one.tags is None else one.tags.tolist() for one in given]
        assert told == [None if kinds[1] is None else [[0, 0], [1, 1], [2, 0]]] * 4
        given.clear()
    assert found[0] == found[1]
