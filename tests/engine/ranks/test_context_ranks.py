"""An engine whose ranks divide the tokens of prompts answers as one of one rank does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.outputs import RequestOutput
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.ranks.token_division import RankStep
from strata.models.save import save
from tests.parallel.models import random_model
from tests.parallel.shards import divisible_config

# Few pages and short steps: prompts are computed in chunks, and sequences are preempted.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 48,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "verbose": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def _ranks_have_left() -> Iterator[None]:
    """A process is in one group of ranks at a time."""
    yield
    gc.collect()


def prompt(length: int, step: int = 7, ids: int = 300) -> list[int]:
    return [(step * place + 3) % ids for place in range(length)]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_alike(one: LLM, two: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
    assert ids(found) == ids(expected)


class Shares:
    """What rank 0 runs of each step: its share, or None where ranks do not divide it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[RankStep | None] = []
        choose = StepProgram.choose

        def noted(program: StepProgram, shape: StepShape) -> StepChoice:
            choice = choose(program, shape)
            if program.division is not None:
                self.found.append(choice.shape.share)
            return choice

        monkeypatch.setattr(StepProgram, "choose", noted)


def test_ranks_that_divide_prompts_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = LLM(**OPTIONS), LLM(prefill_context_parallel_size=2, **OPTIONS)
    shares = Shares(monkeypatch)
    ranks = two.engine.ranks
    assert ranks is not None
    assert two.engine.ledger.weights == one.engine.ledger.weights
    assert two.engine.ledger.page_bytes == one.engine.ledger.page_bytes
    # Own and gathered keys and values of a layer, of shares of up to 24 tokens, two chunks not cut, and padding.
    token = one.engine.ledger.page_bytes // 16 // one.engine.config.num_layers
    assert two.engine.ledger.messages == (1 + 2) * (24 + 16 + 16) * token

    # In chunks, and found again.
    assert_alike(one, two, [prompt(130), prompt(3), prompt(70, 11)], GREEDY)
    assert sum(found is not None for found in shares.found) >= 4
    assert sum(found is None for found in shares.found) > 20
    assert_alike(one, two, [prompt(130) + prompt(60, 13)], GREEDY)
    statistics = two.engine.loop.scheduler.statistics
    assert statistics.prefix_hits >= 128

    # With decodes beside prompts, and preempted.
    assert_alike(one, two, [prompt(80 + count, 13 + count) for count in range(8)], GREEDY)
    assert statistics.preemptions > 0
    assert any(found is not None and 1 in found.counts and found.counts.max() > 8 for found in shares.found)
    sampled = SamplingParams(seed=5, max_tokens=24, temperature=0.8, top_k=20, repetition_penalty=1.2, n=3)
    assert_alike(one, two, [prompt(61, 5), prompt(40)], sampled)

    # Log-probabilities of prompts need all tokens on each rank; those of drawn ids do not.
    shares.found.clear()
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    assert_alike(one, two, [prompt(70, 29)], scored)
    assert set(shares.found) == {None}
    shares.found.clear()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    expected, found = (llm.generate([prompt(70, 31)], params, use_tqdm=False)[0] for llm in (one, two))
    assert shares.found[0] is not None
    for wanted, given in zip(expected.outputs[0].logprobs or (), found.outputs[0].logprobs or (), strict=True):
        assert wanted.keys() == given.keys()
        assert all(given[id].logprob == pytest.approx(entry.logprob, abs=1e-5) for id, entry in wanted.items())
    vectors = [torch.tensor(llm.embed([prompt(40)], use_tqdm=False)[0].outputs.embedding) for llm in (one, two)]
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)
    ranks.check_ids()


MIXTURE: dict[str, Any] = OPTIONS | {"num_pages": 36, "page_size": 4, "max_num_seqs": 4, "skip_tokenizer_init": True}
PROMPTS = [prompt(length, step, 61) for length, step in ((50, 7), (3, 5), (29, 11))]


def mixture_ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_ranks_that_divide_prompts_and_matrices_of_a_mixture_answer_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = divisible_config("qwen3-moe", num_experts=8, mlp_only_layers=[], max_position_embeddings=128)
    save(random_model(config, torch.float32), config, tmp_path)
    options = MIXTURE | {"max_model_len": 128}
    wanted = mixture_ids(LLM(tmp_path, **options))
    ranked: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    moving: dict[str, Any] = {"enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 15}
    llm = LLM(tmp_path, prefill_context_parallel_size=2, **ranked, **moving, **options)
    shares = Shares(monkeypatch)
    assert mixture_ids(llm) == wanted
    assert llm.engine.ranks is not None
    experts = llm.engine.ranks.experts
    assert experts is not None
    assert not any(np.array_equal(experts.slots(layer), np.arange(10) % 8) for layer in experts.layers)
    assert any(found is not None for found in shares.found)
    assert llm.engine.loop.scheduler.statistics.preemptions > 0
    assert llm.engine.ranks is not None
    llm.engine.ranks.check_ids()


def test_deterministic_mode_has_the_bits_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS | {"deterministic": True}
    one, two = LLM(**options), LLM(prefill_context_parallel_size=2, **options)
    shares = Shares(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5, ignore_eos=True)
    expected, found = (llm.generate([prompt(130)], params, use_tqdm=False)[0] for llm in (one, two))
    assert shares.found[0] is not None
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
