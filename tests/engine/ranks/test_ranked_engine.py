"""An engine over ranks answers as one of one rank does, whatever is asked of it."""

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
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.outputs import RequestOutput
from tests.engine.program.programs import graph_of

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
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def started(ranks: int) -> LLM:
    # Of the prompts, long chunks are computed in two halves, short ones whole.
    return LLM(tensor_parallel_size=ranks, overlap_tokens=24 if ranks > 1 else None, **OPTIONS)


@pytest.fixture(scope="module")
def one() -> LLM:
    return started(1)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    llm = started(2)
    yield llm
    assert_same_ids(llm)


def assert_same_ids(llm: LLM) -> None:
    assert llm.engine.ranks is not None
    llm.engine.ranks.check_ids()


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * place + 3) % 300 for place in range(length)]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_alike(one: LLM, two: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    expected = one.generate(prompts, params, use_tqdm=False)
    found = two.generate(prompts, params, use_tqdm=False)
    assert ids(found) == ids(expected)


def test_long_prompts_come_in_chunks_and_are_found_again(one: LLM, two: LLM) -> None:
    assert_alike(one, two, [prompt(130), prompt(3), prompt(70, 11)], GREEDY)
    before = two.engine.loop.scheduler.statistics.prefix_hits
    assert_alike(one, two, [prompt(130)], GREEDY)
    assert two.engine.loop.scheduler.statistics.prefix_hits >= before + 128


def test_messages_travel_beside_products_in_large_steps(one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two.engine.ranks is not None
    ran = []
    for name in ("logits", "overlapped_logits"):
        graph = graph_of(two.engine.program, name)

        def noted(*given: Any, name: str = name, forward: Any = graph.forward) -> Any:
            ran.append((name, len(given[0].tokens)))
            return forward(*given)

        monkeypatch.setattr(graph, "forward", noted)
    assert_alike(one, two, [prompt(62, 19)], SamplingParams(temperature=0, max_tokens=2))
    assert ran == [("overlapped_logits", 48), ("logits", 14), ("logits", 1)]


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
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
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
            assert given[id].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_outputs_follow_a_grammar_beside_others(one: LLM, two: LLM) -> None:
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar), GREEDY]
    outputs = [llm.generate(["Ann is 31.", "Count:"], params, use_tqdm=False) for llm in (one, two)]
    assert ids(outputs[1]) == ids(outputs[0])
    assert isinstance(json.loads(outputs[1][0].outputs[0].text), dict)


class Id(int):
    """An integer that msgspec does not encode."""


def test_ids_of_other_kinds_end_nothing(one: LLM, two: LLM) -> None:
    for ask in (two.generate, two.embed):
        with pytest.raises(ValueError, match="must be integers, got True"):
            ask([[True, 2]], use_tqdm=False)
    assert_alike(one, two, [[Id(7), 3]], GREEDY)
    assert len(two.embed([[Id(7), 3]], use_tqdm=False)) == 1


def test_embeddings_are_alike(one: LLM, two: LLM) -> None:
    prompts = [prompt(40), prompt(7, 3), prompt(12, 5)]
    for pooling in ("last", "mean"):
        vectors = [
            torch.tensor([output.outputs.embedding for output in llm.embed(prompts, pooling, use_tqdm=False)])
            for llm in (one, two)
        ]
        torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)


def test_a_stream_that_is_left_leaves_the_ranks_together(one: LLM, two: LLM) -> None:
    stream = two.stream({"prompt_token_ids": prompt(100, 19)}, GREEDY)
    next(stream)
    stream.close()
    assert_alike(one, two, [prompt(33, 23)], GREEDY)
    assert_same_ids(two)


def test_an_interrupt_leaves_the_ranks_together(one: LLM, two: LLM) -> None:
    for delay in (0.03, 0.1, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([prompt(90, 29), prompt(40, 31)] * 4, LONG, use_tqdm=False)
        timer.join()
    assert_alike(one, two, [prompt(37, 23)], GREEDY)
    assert_same_ids(two)


def test_each_rank_has_its_share_of_weights_and_pages(one: LLM, two: LLM) -> None:
    whole, own = one.engine.ledger, two.engine.ledger
    assert own.weights < 0.6 * whole.weights
    assert own.page_bytes * 2 == whole.page_bytes
    assert two.engine.config == one.engine.config


def test_a_second_engine_over_ranks_is_refused(two: LLM) -> None:
    with pytest.raises(ValueError, match="belongs to a process group"):
        started(2)
