"""Steps whose prompts are all fresh attend over their own keys: as the same steps over pages, within bounds."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.tables import BufferShape
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.kernels.attention.cudnn_plan import plan_for
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

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
Answer = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    if find_spec("cudnn") is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN attends in recorded steps on a Hopper alone, through nvidia-cudnn-frontend")
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES["0.6B"] | {"num_hidden_layers": 8}))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384}
    return LLM(folder, num_pages=4000, enable_prefix_caching=False, **options)


def run(llm: LLM, prompts: list[list[int]], fresh: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Answer], Any]:
    """The answers, and the size of the first step."""
    holding, taken = StepSizes.holding, []

    def noted(sizes: StepSizes, shape: StepShape) -> BufferShape | None:
        taken.append(holding(sizes, shape if fresh else shape._replace(fresh=None)))
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(StepSizes, "holding", noted)
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = []
    for output in outputs:
        sample = output.outputs[0]
        assert sample.logprobs is not None
        answers.append((sample.token_ids, [{id: one for id, (one, *_) in entry.items()} for entry in sample.logprobs]))
    return answers, taken[0]


def test_fresh_steps_answer_as_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, vocabulary = random.Random(0), llm.engine.config.vocab_size
    plans, apart = plan_for.cache_info().misses, []
    for lengths in BATCHES:
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        (found, size), (wanted, other) = (run(llm, prompts, fresh, monkeypatch) for fresh in (True, False))
        assert (size.fresh, other.fresh) == (True, False), lengths
        assert size.tokens == other.tokens >= sum(lengths)
        for (ids, entries), (other_ids, others) in zip(found, wanted, strict=True):
            for mine, theirs, id, other_id in zip(entries, others, ids, other_ids, strict=True):
                apart += [abs(mine[key] - theirs[key]) for key in mine.keys() & theirs.keys()]
                if id != other_id:  # from here on they continue different texts
                    break
    errors = torch.tensor(apart)
    print(f"{len(apart)} log-probabilities: {errors.mean():.5f} apart on average, {errors.max():.4f} at most")
    assert len(apart) > 200
    assert float(errors.mean()) < 0.02
    assert float(errors.max()) < 0.25
    assert plan_for.cache_info().misses == plans  # none is made once the engine is ready


def test_only_fresh_steps_take_their_sizes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than a step is fresh in its first, and has keys in pages in the next."""
    holding, taken = StepSizes.holding, []

    def noted(sizes: StepSizes, shape: StepShape) -> BufferShape | None:
        taken.append(holding(sizes, shape))
        return taken[-1]

    monkeypatch.setattr(StepSizes, "holding", noted)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm.generate({"prompt_token_ids": [7] * 12_000}, params, use_tqdm=False)
    assert [size.fresh for size in taken if size.tokens > size.sequences] == [True, False]
