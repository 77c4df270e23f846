"""The engine on CUDA: graphs, running ahead, preemption, grammars, fixed bits; against transformers and itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams, StructuredOutputsParams
from strata.engine.outputs import RequestOutput
from tests.engine.test_answers import greedy
from tests.models.checkpoints import FAMILY_CONFIGS, load_oracle, make_checkpoint
from tests.models.sparse_models import SPARSE_CONFIGS

SPARSE = [(name, SPARSE_CONFIGS[name]) for name in ("mixtral", "qwen3-moe", "qwen3-moe-dense-layers-biases")]
FEW = [entry for entry in FAMILY_CONFIGS if entry[0] in ("llama-llama3", "mistral-window", "qwen2-tied", "qwen3-tied")]


def prompts(vocabulary: int, count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(vocabulary) for _ in range(20)]
    made = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, longest - 20))] for _ in range(count)]
    return [shared + own if index % 2 else own for index, own in enumerate(made)]


def run(llm: LLM, asked: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    llm.engine.loop.scheduler.check()
    return outputs


def samples_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def ids_of(llm: LLM, asked: list[list[int]], params: Any) -> list[list[int]]:
    return samples_of(run(llm, asked, params))


@pytest.mark.parametrize(("name", "config"), FEW + SPARSE, ids=[name for name, _ in FEW + SPARSE])
def test_greedy_tokens_equal_transformers(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, config)
    llm = LLM(
        folder, dtype="float32", num_pages=300, max_num_seqs=16, max_num_batched_tokens=64, skip_tokenizer_init=True
    )
    asked = prompts(config["vocab_size"], 20, 60)
    got = ids_of(llm, asked, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    oracle = load_oracle(folder)
    assert got == [greedy(oracle, prompt, ids) for prompt, ids in zip(asked, got, strict=True)]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 0.02), ("bfloat16", 0.2)])
def test_mixtures_of_any_dtype(dtype: str, bound: float, tmp_path: Path) -> None:
    """Also in chunks that draw nothing, where no row is left for the experts of the last layer."""
    folder = make_checkpoint(tmp_path, SPARSE_CONFIGS["qwen3-moe"])
    options: dict[str, Any] = {"num_pages": 100, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    asked = [{"prompt_token_ids": ids} for ids in prompts(83, 6, 60)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    found = []
    for way in ({"dtype": dtype}, {"dtype": "float32", "device": "cpu"}):
        outputs = LLM(folder, skip_tokenizer_init=True, **options, **way).generate(asked, params, use_tqdm=False)
        found.append([output.outputs[0].logprobs for output in outputs])
    for mine, exact in zip(*found, strict=True):
        assert mine is not None
        assert exact is not None
        both = mine[0].keys() & exact[0].keys()
        assert len(both) > 10
        assert max(abs(mine[0][id].logprob - exact[0][id].logprob) for id in both) <= bound


def test_sampling_options_give_the_cpu_tokens(folder: Path) -> None:
    asked = prompts(307, 9, 60)
    params = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=2, top_k=9, top_p=0.8, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0, logit_bias={7: 4.0}, min_tokens=9, max_tokens=16),
        SamplingParams(temperature=1.2, seed=5, min_p=0.05, presence_penalty=1.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, bad_words=["the", "fox jumps"], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, logprobs=4, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.5, seed=8, max_tokens=40, ignore_eos=True),
    ]
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 200, "max_num_seqs": 16}
    assert ids_of(LLM(folder, **options), asked, params) == ids_of(LLM(folder, device="cpu", **options), asked, params)


def test_samples_share_a_prompt_and_preemption_loses_nothing(folder: Path) -> None:
    asked = prompts(307, 12, 90, seed=3)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=30, ignore_eos=True) for i in range(12)]
    options: dict[str, Any] = {"dtype": "float32", "deterministic": True, "max_num_seqs": 32}
    want = ids_of(LLM(folder, num_pages=400, **options), asked, params)
    tight = LLM(folder, num_pages=16, max_num_batched_tokens=40, **options)
    assert ids_of(tight, asked, params) == want
    assert tight.engine.loop.scheduler.statistics.preemptions > 0
    sampled = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    output = LLM(folder, num_pages=400, **options).generate({"prompt_token_ids": asked[0]}, sampled, use_tqdm=False)[0]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_bits_do_not_depend_on_company(folder: Path, dtype: str) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(307) for _ in range(75)]
    crowd = prompts(307, 40, 110, seed=9)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, logprobs=2, ignore_eos=True)

    def bits(llm: LLM, asked: list[list[int]], which: int) -> Any:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
        sample = outputs[which].outputs[0]
        assert sample.logprobs is not None
        return sample.token_ids, [sorted((id, entry.logprob) for id, entry in e.items()) for e in sample.logprobs]

    def llm(**options: int) -> LLM:
        return LLM(folder, dtype=dtype, deterministic=True, **{"num_pages": 900, "max_num_seqs": 64, **options})

    alone = bits(llm(), [prompt], 0)
    assert bits(llm(), [*crowd[:4], prompt, *crowd[4:]], 4) == alone, "in a batch"
    assert bits(llm(max_num_batched_tokens=64), [*crowd, prompt], 40) == alone, "in chunks of a batch"
    cached = llm()
    bits(cached, [prompt[:50] + crowd[0], *crowd[:2]], 0)
    assert bits(cached, [prompt, *crowd[2:5]], 0) == alone, "with its prefix cached"


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
    assert samples_of(found) == samples_of(run(LLM(folder, device="cpu", **options), asked, params))
    assert_follow(found[::5] + found[2::5] + found[4::5])


def test_free_requests_beside_constrained_ones_keep_their_bits(folder: Path) -> None:
    llm = LLM(folder, dtype="bfloat16", deterministic=True, num_pages=400, max_num_seqs=64)
    asked = prompts(307, 24, 90, seed=2)
    free = [SamplingParams(temperature=0.8, seed=n, max_tokens=40, ignore_eos=True) for n in range(12)]
    mixed = [one for pair in zip(free, [constrained(seed=n) for n in range(12)], strict=True) for one in pair]
    outputs = run(llm, asked, mixed)
    assert samples_of(outputs[::2]) == samples_of(run(llm, asked[::2], free))
    assert_follow(outputs[1::2])


def test_samples_and_preemption(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "deterministic": True, "max_num_seqs": 32}
    asked = prompts(307, 12, 60, seed=3)
    params = [constrained(n=2, seed=n) for n in range(12)]
    want = run(LLM(folder, num_pages=400, **options), asked, params)
    tight = LLM(folder, num_pages=20, max_num_batched_tokens=40, **options)
    assert samples_of(run(tight, asked, params)) == samples_of(want)
    assert tight.engine.loop.scheduler.statistics.preemptions > 0
    assert_follow(want)
