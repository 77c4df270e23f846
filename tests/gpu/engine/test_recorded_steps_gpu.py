"""Recorded steps with prompts against the same steps launched eagerly: bits in deterministic mode, else bounds."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.tables import BufferShape
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

LAYERS = {"0.6B": 8, "8B": 4}
Answer = tuple[list[int], list[dict[int, float]]]


class Counted:
    """An engine whose steps with prompts can be launched either way, and who counts those that were replayed."""

    def __init__(self, folder: Path, deterministic: bool) -> None:
        """No step is too large to be recorded."""
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
        options |= {"num_pages": 3000, "max_num_seqs": 80, "enable_prefix_caching": False}
        options |= {"max_num_batched_tokens": 2000}
        self.deterministic = deterministic
        self.llm = LLM(folder, deterministic=deterministic, **options)
        self.vocabulary = self.llm.engine.config.vocab_size

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], *, eagerly: bool
    ) -> tuple[list[Answer], list[BufferShape]]:
        """The answers, and the sizes of steps with prompts that were replayed."""
        replayed: list[BufferShape | None] = []
        holding = StepSizes.holding

        def noted(sizes: StepSizes, shape: StepShape) -> BufferShape | None:
            found = None if eagerly and not shape.decodes else holding(sizes, shape)
            if not shape.decodes:
                replayed.append(found)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepSizes, "holding", noted)
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        answers = []
        for output in outputs:
            sample = output.outputs[0]
            assert sample.logprobs is not None
            entries = [{id: logprob for id, (logprob, *_) in entry.items()} for entry in sample.logprobs]
            answers.append((sample.token_ids, entries))
        return answers, [found for found in replayed if found is not None]


@pytest.fixture(scope="module", params=[(shape, mode) for shape in LAYERS for mode in (True, False)], ids=str)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    shape, deterministic = request.param
    folder = tmp_path_factory.mktemp(shape)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": LAYERS[shape]}))
    return Counted(folder, deterministic)


def test_the_same_answers_as_eagerly(subject: Counted) -> None:
    """Requests come one after the other as those before end, so that most steps with prompts have decodes beside. The
    first step has many prompts."""
    draw = random.Random(0)
    lengths = [20] * 40
    lengths += [draw.choice([1, 7, 30, 100, 300, 512, 700, 1500, 2040, 2600]) for _ in range(120)]
    prompts = [[draw.randrange(subject.vocabulary) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=draw.randrange(1, 30), ignore_eos=True, logprobs=3) for _ in prompts
    ]
    wanted, none = subject.run(prompts, params, eagerly=True)
    found, replayed = subject.run(prompts, params, eagerly=False)
    assert none == []
    assert len(replayed) > 20
    without = subject.deterministic or find_spec("cudnn") is None or torch.cuda.get_device_capability()[0] != 9
    assert {size.prompts for size in replayed} == ({None} if without else {16, None})
    if subject.deterministic:
        assert found == wanted
        return
    apart = []
    for (ids, entries), (other_ids, others) in zip(found, wanted, strict=True):
        for mine, other, id, other_id in zip(entries, others, ids, other_ids, strict=True):
            apart += [abs(mine[key] - other[key]) for key in mine.keys() & other.keys()]
            if id != other_id:  # from here on they continue different texts
                break
    errors = torch.tensor(apart)
    print(f"{len(apart)} log-probabilities: {errors.mean():.5f} apart on average, {errors.max():.4f} at most")
    assert len(apart) > 1000
    assert float(errors.mean()) < 0.02
    assert float(errors.max()) < 0.25
