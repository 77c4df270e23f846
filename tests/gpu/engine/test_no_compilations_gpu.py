"""Before an engine is ready prompts have run, and other processes compiled; once it is, nothing compiles."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.bench.workloads import LARGEST_ID, offline
from strata.engine.scheduling.config import Statistics
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


def started(folder: str, model: str) -> tuple[Counter[str], Counter[str], list[list[int]]]:
    """What the process compiles and reads before it is ready, and after; and ids.

    folder: of the cache on the disk. To be called in a process that has launched nothing.
    """
    import os

    os.environ["TRITON_CACHE_DIR"] = folder
    before: list[Compiled] = []
    end = listen(before.append)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 20_000}
    llm = LLM(model, num_pages=6000, seed=0, verbose=False, **options)
    end()
    after: list[Compiled] = []
    end = listen(after.append)
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[rng.randrange(1000) for _ in range(length)] for length in (1, 5, 90, 700, 6001, 9001, 19_001)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=3, repetition_penalty=1.1)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:4]], scored, use_tqdm=False)
    llm.embed([{"prompt_token_ids": prompt} for prompt in prompts[:5]])
    end()
    kinds = [Counter(str(one.kind) for one in some) for some in (before, after)]
    return kinds[0], kinds[1], [list(output.outputs[0].token_ids) for output in outputs]


def elsewhere(folder: Path, model: str) -> tuple[Counter[str], Counter[str], list[list[int]]]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(started, str(folder), model).result()


def test_other_processes_compile(tmp_path: Path) -> None:
    before, after, ids = elsewhere(tmp_path, "0.6B")
    assert before.keys() == {"cached kernel"}
    assert after == {}
    again, later, same = elsewhere(tmp_path, "0.6B")
    assert again == before
    assert later == {}
    assert same == ids
    for number, path in enumerate(sorted(tmp_path.rglob("*.cubin"))):
        content = path.read_bytes()
        if number % 3 == 0:
            path.write_bytes(content[: len(content) // 2])
        elif number % 3 == 1:
            path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    damaged, later, same = elsewhere(tmp_path, "0.6B")
    assert damaged["kernel"] > 0
    assert later == {}
    assert same == ids


@pytest.mark.parametrize(("longest", "pages"), [(2, 2000), (8, 2000), (4096, 2), (4096, 2000)])
def test_prompts_run_and_are_forgotten(longest: int, pages: int) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest, "num_pages": pages}
    engine = LLM("0.6B", **options).engine
    assert engine.startup["warm up"] > 0
    assert engine.loop.idle
    assert engine.loop.scheduler.statistics == Statistics()
    assert (engine.pages.free, engine.pages.idle) == (pages, 0)
    engine.loop.scheduler.check()
