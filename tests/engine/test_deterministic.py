"""Deterministic mode: the same request, bit for bit, whatever it shares the engine with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from strata import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=20, logprobs=2, ignore_eos=True)


def signature(llm: LLM, asked: list[list[int]], which: int) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Ids and the exact log-probabilities of one of the requests."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], PARAMS, use_tqdm=False)
    sample = outputs[which].outputs[0]
    assert sample.logprobs is not None
    return sample.token_ids, [[(id, e.logprob) for id, e in sorted(entry.items())] for entry in sample.logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company(folder: Path, dtype: str) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(307) for _ in range(75)]
    crowd = [[rng.randrange(307) for _ in range(rng.randrange(1, 120))] for _ in range(9)]

    def llm(**options: int) -> LLM:
        return LLM(folder, device="cpu", dtype=dtype, deterministic=True, **{"num_pages": 300, **options})

    alone = signature(llm(), [prompt], 0)
    assert signature(llm(), [*crowd[:4], prompt, *crowd[4:]], 4) == alone, "in a batch"
    assert signature(llm(max_num_batched_tokens=11), [prompt], 0) == alone, "in chunks"
    assert signature(llm(max_num_batched_tokens=17), [*crowd, prompt], 9) == alone, "in chunks of a batch"
    cached = llm()
    signature(cached, [[*prompt[:50], 1, 2, 3], *crowd[:2]], 0)
    assert signature(cached, [prompt, *crowd[2:5]], 0) == alone, "with its prefix cached"
    assert signature(llm(page_size=32), [prompt], 0) == alone, "in larger pages"
