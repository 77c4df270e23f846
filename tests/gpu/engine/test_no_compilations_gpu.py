"""Once it is ready an engine compiles nothing, whatever it is asked for."""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.bench.workloads import LARGEST_ID, offline
from strata.kernels.compiled import Compiled, listen

pytestmark = pytest.mark.gpu

Requests = tuple[list[list[int]], list[SamplingParams]]

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.02}, {"logprobs": 3},
    {"logprobs": 0, "top_k": 5}, {"repetition_penalty": 1.2}, {"seed": 7, "presence_penalty": 0.5, "top_p": 0.5},
    {"logit_bias": {5: 3.0, 9: -100.0}}, {"min_tokens": 3, "stop_token_ids": [11]}, {"n": 3, "top_p": 0.9},
    {"prompt_logprobs": 2},
]  # fmt: skip


def t1_shortened() -> Requests:
    """The prompts of T1, with outputs that end apart."""
    test = offline()
    outputs = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count // 16) for count in test.outputs]
    return [list(prompt) for prompt in test.prompts], outputs


def random_mix() -> Requests:
    """2,000 short and long ones, sampled in many ways, some of which begin alike."""
    rng = random.Random(1)
    shared = [rng.randint(0, LARGEST_ID) for _ in range(300)]
    prompts, params = [], []
    for number in range(2000):
        length = rng.choice([1, 7, 40, 200, rng.randint(1, 700)]) if number % 50 else rng.randint(1000, 3500)
        prompts.append(shared[: rng.choice([0, 100, 300])] + [rng.randint(0, LARGEST_ID) for _ in range(length)])
        way = rng.choice(WAYS)
        most = rng.randint(way.get("min_tokens", 1), 60)
        params.append(SamplingParams(ignore_eos=True, max_tokens=most, **way))
    return prompts, params


def compiled_after_ready(caching: bool) -> tuple[list[Compiled], int]:
    """What is compiled, and how much of it the engine counts, in a process that has compiled nothing before."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    llm = LLM("0.6B", enable_prefix_caching=caching, num_pages=6000, seed=0, **options)
    met: list[Compiled] = []
    end = listen(met.append)
    for prompts, params in (t1_shortened(), random_mix()):
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    end()
    return met, llm.engine.compilations.total


@pytest.mark.parametrize("caching", [False, True])
def test_nothing_compiles_after_ready(caching: bool) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        met, counted = fresh.submit(compiled_after_ready, caching).result()
    assert met == []
    assert counted == 0
