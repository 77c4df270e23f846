"""Two stages of a pipeline answer as one rank does, whatever is asked of them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.ranks.rank import share_of
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from tests.engine.ranks.test_ranked_engine import (
    GREEDY,
    LONG,
    OPTIONS,
    SCHEMA,
    assert_alike,
    assert_same_ids,
    ids,
    prompt,
)


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(**OPTIONS)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    llm = LLM(pipeline_parallel_size=2, **OPTIONS)
    yield llm
    assert_same_ids(llm)


def test_long_prompts_come_in_chunks_and_are_found_again(one: LLM, two: LLM) -> None:
    assert_alike(one, two, [prompt(130), prompt(3), prompt(70, 11)], GREEDY)
    before = two.engine.loop.scheduler.statistics.prefix_hits
    assert_alike(one, two, [prompt(130)], GREEDY)
    assert two.engine.loop.scheduler.statistics.prefix_hits >= before + 128


def test_sequences_are_preempted(one: LLM, two: LLM) -> None:
    before = two.engine.loop.scheduler.statistics.preemptions
    assert_alike(one, two, [prompt(80 + count, 13 + count) for count in range(8)], GREEDY)
    assert two.engine.loop.scheduler.statistics.preemptions > before


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -3.0}, "min_tokens": 8, "stop_token_ids": [1]},
    ],
    ids=["seed", "filters", "penalties", "bias"],
)
def test_sampling_is_alike(one: LLM, two: LLM, sampling: dict[str, Any]) -> None:
    assert_alike(one, two, [prompt(20), prompt(31, 5)], SamplingParams(seed=5, max_tokens=24, **sampling))


def test_log_probabilities_are_alike(one: LLM, two: LLM) -> None:
    """Those of the likeliest 20 ids of each token."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    expected, found = (llm.generate([prompt(70, 17)], params, use_tqdm=False)[0] for llm in (one, two))
    assert ids([found]) == ids([expected])
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    pairs = [*zip(expected.prompt_logprobs[1:], found.prompt_logprobs[1:], strict=True)]
    pairs += zip(expected.outputs[0].logprobs or [], found.outputs[0].logprobs or [], strict=True)
    assert len(pairs) == 69 + 8
    for wanted, given in pairs:
        assert wanted is not None
        assert given is not None
        assert wanted.keys() == given.keys()
        for id, entry in wanted.items():
            assert given[id].logprob == pytest.approx(entry.logprob, abs=1e-5)
            assert given[id].rank == entry.rank


def test_outputs_follow_a_grammar_beside_others(one: LLM, two: LLM) -> None:
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar), GREEDY]
    outputs = [llm.generate(["Ann is 31.", "Count:"], params, use_tqdm=False) for llm in (one, two)]
    assert ids(outputs[1]) == ids(outputs[0])
    assert isinstance(json.loads(outputs[1][0].outputs[0].text), dict)


def test_embeddings_are_alike(one: LLM, two: LLM) -> None:
    prompts = [prompt(40), prompt(7, 3), prompt(12, 5)]
    for pooling in ("last", "mean"):
        vectors = [
            torch.tensor([output.outputs.embedding for output in llm.embed(prompts, pooling, use_tqdm=False)])
            for llm in (one, two)
        ]
        torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)


def test_a_stream_that_is_left_and_an_interrupt_leave_the_ranks_together(one: LLM, two: LLM) -> None:
    stream = two.stream({"prompt_token_ids": prompt(100, 19)}, GREEDY)
    next(stream)
    stream.close()
    assert_alike(one, two, [prompt(33, 23)], GREEDY)
    for delay in (0.03, 0.1, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([prompt(90, 29), prompt(40, 31)] * 4, LONG, use_tqdm=False)
        timer.join()
    assert_alike(one, two, [prompt(37, 23)], GREEDY)
    assert_same_ids(two)


def test_each_stage_has_its_share_of_weights_and_pages(one: LLM, two: LLM) -> None:
    whole, own = one.engine.ledger, two.engine.ledger
    assert own.weights < 0.75 * whole.weights
    assert own.page_bytes < whole.page_bytes
    assert two.engine.config == one.engine.config


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_stages_record_the_same_sizes_of_steps(tensor: int) -> None:
    """They hold different parts of the weights, and what one sends has the length that the next one takes."""
    config, limits = config_from_dict(SHAPES["8B"], "8B"), DeviceLimits.listed(device("h200"))
    asked = EngineConfig("8B", pipeline_parallel_size=2, tensor_parallel_size=tensor)
    shards = [share_of(asked, config, rank) for rank in (0, tensor)]
    first, last = (EngineSizes.of(asked, one.config, torch.device("cuda"), limits, one) for one in shards)
    assert first.recorded == last.recorded
    assert first.max_tokens == last.max_tokens == 4096
    assert first.weight_bytes != last.weight_bytes
    whole = EngineSizes.of(EngineConfig("8B"), config, torch.device("cuda"), limits)
    assert tensor * (first.weight_bytes + last.weight_bytes) == pytest.approx(
        whole.weight_bytes, rel=0.02
    )  # rotary tables
    assert first.pool.layers + last.pool.layers == whole.pool.layers


def test_more_stages_than_layers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size=99: each stage needs a layer"):
        LLM(pipeline_parallel_size=99, **OPTIONS)
