"""Constrained decoding on CUDA: one step ahead, from recorded graphs, in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams, StructuredOutputsParams
from strata.engine.outputs import RequestOutput
from tests.gpu.engine.test_engine_gpu import prompts

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes", None]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def constrained(**options: Any) -> SamplingParams:
    output = StructuredOutputsParams(json=SCHEMA)
    return SamplingParams(**{"max_tokens": 100, "seed": 4, **options}, structured_outputs=output)


def run(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    llm.engine.loop.scheduler.check()
    return outputs


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_follow(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason == "stop", output.error
            found = json.loads(sample.text)
            assert found["a"] in ("x", "yes", None)
            assert 0 <= found["n"] <= 99


def test_constrained_tokens_are_the_cpu_tokens(folder: Path) -> None:
    asked = prompts(307, 10, 60)
    params = [
        constrained(temperature=0),
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True),
        constrained(temperature=0.8, top_k=9, top_p=0.8),
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, ignore_eos=True),
        constrained(temperature=0.8, logprobs=3, frequency_penalty=0.5),
    ] * 2
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 200, "max_num_seqs": 16, "max_num_batched_tokens": 40}
    found = run(LLM(folder, **options), asked, params)
    assert ids_of(found) == ids_of(run(LLM(folder, device="cpu", **options), asked, params))
    assert_follow(found[::5] + found[2::5] + found[4::5])


def test_free_requests_beside_constrained_ones_keep_their_bits(folder: Path) -> None:
    llm = LLM(folder, dtype="bfloat16", deterministic=True, num_pages=400, max_num_seqs=64)
    asked = prompts(307, 24, 90, seed=2)
    free = [SamplingParams(temperature=0.8, seed=n, max_tokens=40, ignore_eos=True) for n in range(12)]
    mixed = [one for pair in zip(free, [constrained(seed=n) for n in range(12)], strict=True) for one in pair]
    outputs = run(llm, asked, mixed)
    assert ids_of(outputs[::2]) == ids_of(run(llm, asked[::2], free))
    assert_follow(outputs[1::2])


def test_samples_and_preemption(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "deterministic": True, "max_num_seqs": 32}
    asked = prompts(307, 12, 60, seed=3)
    params = [constrained(n=2, seed=n) for n in range(12)]
    want = run(LLM(folder, num_pages=400, **options), asked, params)
    tight = LLM(folder, num_pages=20, max_num_batched_tokens=40, **options)
    assert ids_of(run(tight, asked, params)) == ids_of(want)
    assert tight.engine.loop.scheduler.statistics.preemptions > 0
    assert_follow(want)
