"""Deterministic mode on CUDA, as docs/engine.md states it: what may not change the bits of a request does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.outputs import RequestOutput
from strata.models.shapes import SHAPES

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=40, logprobs=2, ignore_eos=True)
Bits = tuple[list[int], list[dict[int, float]]]


class Subject(NamedTuple):
    """What runs, and how long the prompt is: decoding passes a part's end.

    shape: of `SHAPES`, with so many layers of random weights; None for the small model of the tests. Two engines of 8B
    with all its layers would leave little of a GPU, and every layer runs the same kernels.
    """

    shape: str | None
    layers: int
    dtype: str
    vocabulary: int
    prompt: int


SUBJECTS = [
    Subject(None, 3, "float32", 307, 120),
    Subject(None, 3, "bfloat16", 307, 120),
    Subject("0.6B", 28, "bfloat16", 151936, 500),
    Subject("8B", 4, "bfloat16", 128256, 1010),
]


class Engines:
    """Two engines for one subject: one that runs prompts whole and caches none, one that cuts them up and does."""

    def __init__(self, subject: Subject, folder: Path, device: str = "cuda") -> None:
        """folder: of the model; for a shape its config.json is enough."""
        self.subject = subject
        options: dict[str, Any] = {"dtype": subject.dtype, "deterministic": True, "device": device, "num_pages": 2500}
        if subject.shape is not None:
            options |= {"load_format": "dummy", "max_model_len": 4096}
        options |= {"max_num_seqs": 48, "skip_tokenizer_init": True}
        self.whole = LLM(folder, enable_prefix_caching=False, **options)
        self.cut = LLM(folder, max_num_batched_tokens=77, **options)
        rng = random.Random(0)
        self.prompt = self._draw(rng, subject.prompt)
        self.crowd = [self._draw(rng, rng.randrange(1, subject.prompt)) for _ in range(30)]
        self.alone = bits_of(run(self.whole, [self.prompt])[0])

    def _draw(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self.subject.vocabulary) for _ in range(count)]


def run(llm: LLM, asked: list[list[int]], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)


def bits_of(output: RequestOutput) -> Bits:
    """The ids, and for each the exact log-probabilities that were reported."""
    sample = output.outputs[0]
    assert sample.logprobs is not None
    assert len(sample.token_ids) == PARAMS.max_tokens
    return sample.token_ids, [{id: logprob for id, (logprob, *_) in entry.items()} for entry in sample.logprobs]


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: f"{subject.shape or 'small'}-{subject.dtype}")
def engines(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    subject: Subject = request.param
    if subject.shape is not None:
        folder = tmp_path_factory.mktemp(subject.shape)
        config = SHAPES[subject.shape] | {"num_hidden_layers": subject.layers}
        (folder / "config.json").write_text(json.dumps(config))
    return Engines(subject, folder)


def test_the_batch(engines: Engines) -> None:
    for before in (0, 3, 30):
        asked = [*engines.crowd[:before], engines.prompt, *engines.crowd[before:]]
        assert bits_of(run(engines.whole, asked)[before]) == engines.alone, f"after {before} others"
    for others in (1, 7, 15):
        asked = [*engines.crowd[:others], engines.prompt]
        assert bits_of(run(engines.whole, asked)[others]) == engines.alone, f"with {others} others"


def test_the_chunks_of_a_prompt_and_its_cached_prefix(engines: Engines) -> None:
    cold = run(engines.cut, [*engines.crowd, engines.prompt])[-1]
    assert cold.num_cached_tokens == 0
    assert bits_of(cold) == engines.alone, "in chunks of a batch"
    warm = run(engines.cut, [engines.prompt])[0]
    assert warm.num_cached_tokens > len(engines.prompt) // 2
    assert bits_of(warm) == engines.alone, "with its prefix cached"
    other = run(engines.cut, [[*engines.prompt[: len(engines.prompt) // 2], 1, 2, 3], engines.prompt])[1]
    assert bits_of(other) == engines.alone, "with its prefix cached by two"


def test_decoding_has_the_bits_of_prefill(engines: Engines) -> None:
    ids, decoded = engines.alone
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=PARAMS.logprobs, ignore_eos=True)
    for llm in (engines.whole, engines.cut):
        output = run(llm, [engines.prompt + ids, *engines.crowd[:3]], scored)[0]
        assert output.prompt_logprobs is not None
        for place, entry in enumerate(output.prompt_logprobs[len(engines.prompt) :]):
            assert entry is not None
            found = {id: logprob for id, (logprob, *_) in entry.items()}
            assert found == decoded[place], f"token {place}"
