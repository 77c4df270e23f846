"""Captured steps with prompts against others: bits in deterministic mode, else bounds; pure prefill over own keys."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.tables import BufferShape
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.kernels.attention.cudnn_prompts import plan_for
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

LAYERS = {"0.6B": 8, "8B": 4}
OPTIONS: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
Answer = tuple[list[int], list[dict[int, float]]]
Holding = Callable[[StepSizes, StepShape], BufferShape | None]
Taken = list[tuple[StepShape, BufferShape | None]]


def make(shape: str, factory: pytest.TempPathFactory, **options: Any) -> LLM:
    folder = factory.mktemp(shape)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": LAYERS[shape]}))
    return LLM(folder, **OPTIONS, **options)


def without_cudnn() -> bool:
    return find_spec("cudnn") is None or torch.cuda.get_device_capability()[0] != 9


def run(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    choose: Callable[[Holding, StepSizes, StepShape], BufferShape | None],
) -> tuple[list[Answer], Taken]:
    """The answers, and the shapes of all steps with the sizes that they were replayed in. choose: the size of a step by
    the engine's own choice."""
    holding, taken = StepSizes.holding, []

    def noted(sizes: StepSizes, shape: StepShape) -> BufferShape | None:
        taken.append((shape, choose(holding, sizes, shape)))
        return taken[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSizes, "holding", noted)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = []
    for output in outputs:
        sample = output.outputs[0]
        assert sample.logprobs is not None
        answers.append((sample.token_ids, [{id: one for id, (one, *_) in entry.items()} for entry in sample.logprobs]))
    return answers, taken


def apart(found: list[Answer], wanted: list[Answer]) -> list[float]:
    """How far log-probabilities of the same texts lie from each other."""
    errors = []
    for (ids, entries), (other_ids, others) in zip(found, wanted, strict=True):
        for mine, other, id, other_id in zip(entries, others, ids, other_ids, strict=True):
            errors += [abs(mine[key] - other[key]) for key in mine.keys() & other.keys()]
            if id != other_id:  # from here on they continue different texts
                break
    return errors


def assert_near(apart: list[float], least: int) -> None:
    errors = torch.tensor(apart)
    print(f"{len(apart)} log-probabilities: {errors.mean():.5f} apart on average, {errors.max():.4f} at most")
    assert len(apart) > least
    assert float(errors.mean()) < 0.02
    assert float(errors.max()) < 0.25


@pytest.fixture(scope="module", params=[(shape, mode) for shape in LAYERS for mode in (True, False)], ids=str)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, bool]:
    """An engine no step of which is too large to be captured, and whether it is deterministic."""
    shape, deterministic = request.param
    options = {"max_model_len": 4096, "num_pages": 3000, "max_num_seqs": 80, "max_num_batched_tokens": 2000}
    return make(shape, tmp_path_factory, deterministic=deterministic, **options), deterministic


def test_steps_with_prompts_answer_as_eagerly(subject: tuple[LLM, bool]) -> None:
    """Requests come one after the other as those before end, so that most steps with prompts have decodes beside. The
    first step has many prompts."""
    llm, deterministic = subject
    draw, vocabulary = random.Random(0), llm.engine.config.vocab_size
    lengths = [20] * 40
    lengths += [draw.choice([1, 7, 30, 100, 300, 512, 700, 1500, 2040, 2600]) for _ in range(120)]
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=draw.randrange(1, 30), ignore_eos=True, logprobs=3) for _ in prompts
    ]
    wanted, eager = run(llm, prompts, params, lambda own, sizes, shape: own(sizes, shape) if shape.decodes else None)
    found, taken = run(llm, prompts, params, lambda own, sizes, shape: own(sizes, shape))
    assert {size for shape, size in eager if not shape.decodes} == {None}
    replayed = [size for shape, size in taken if not shape.decodes and size is not None]
    assert len(replayed) > 20
    assert {size.prompts for size in replayed} == ({None} if deterministic or without_cudnn() else {16, None})
    if deterministic:
        assert found == wanted
    else:
        assert_near(apart(found, wanted), 1000)


BATCHES = [
    (2048,) * 4,
    (512,) * 16,
    (8192,),
    (1, 1, 1900),
    (2047, 700, 1024),
    (3001,),
    tuple(range(401, 417)),
    (5000, 1, 130),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    if without_cudnn():
        pytest.skip("cuDNN attends in recorded steps on a Hopper alone, through nvidia-cudnn-frontend")
    return make("0.6B", tmp_path_factory, max_model_len=16384, num_pages=4000)


def test_pure_prefill_steps_answer_as_others(llm: LLM) -> None:
    """Over their own keys as over pages."""
    draw, vocabulary = random.Random(0), llm.engine.config.vocab_size
    plans, errors = plan_for.cache_info().misses, []
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
    for lengths in BATCHES:
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        found, taken = run(llm, prompts, params, lambda own, sizes, shape: own(sizes, shape))
        wanted, others = run(
            llm, prompts, params, lambda own, sizes, shape: own(sizes, shape._replace(pure_prefill_rows=None))
        )
        size, other = taken[0][1], others[0][1]
        assert size is not None
        assert other is not None
        assert (size.pure_prefill, other.pure_prefill) == (True, False), lengths
        assert size.tokens == other.tokens >= sum(lengths)
        errors += apart(found, wanted)
    assert_near(errors, 200)
    assert plan_for.cache_info().misses == plans  # none is made once the engine is ready


def test_only_pure_prefill_steps_take_their_sizes(llm: LLM) -> None:
    """A prompt longer than a step is pure prefill in its first step, and has keys in pages in the next."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0)
    _, taken = run(llm, [[7] * 12_000], params, lambda own, sizes, shape: own(sizes, shape))
    assert [size.pure_prefill for _, size in taken if size is not None and size.tokens > size.sequences] == [
        True,
        False,
    ]
