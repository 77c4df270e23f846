"""A start on a new machine compiles nothing in its own process, and what it serves meets nothing new."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.kernels.compiled import Compiled, listen

pytestmark = pytest.mark.gpu


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
