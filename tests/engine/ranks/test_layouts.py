"""An engine over ranks answers as one of one rank does, whatever is asked of it and however ranks divide it."""

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
from strata.engine.ranks import messages
from strata.engine.scheduling.rank_schedulers import RankPages
from tests.engine.ranks.layouts import (
    LAYOUTS,
    Layout,
    assert_alike,
    assert_same_ids,
    greedy,
    ids,
    prompt,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def options(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return layout.options(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(options: dict[str, Any]) -> LLM:
    return LLM(**options)


@pytest.fixture(scope="module")
def two(layout: Layout, options: dict[str, Any]) -> Iterator[LLM]:
    llm = layout.over_ranks(options)
    yield llm
    assert_same_ids(llm)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", names, indirect=True)


def statistics(llm: LLM) -> Any:
    return llm.engine.loop.scheduler.statistics


def test_long_prompts_come_in_chunks_and_are_found_again(one: LLM, two: LLM) -> None:
    assert_alike(one, two, [prompt(130), prompt(3), prompt(70, 11)], greedy(24))
    before = statistics(two).prefix_hits
    assert_alike(one, two, [prompt(130) + prompt(20, 13)], greedy(16))
    assert statistics(two).prefix_hits >= before + 128
    assert two.engine.pages.usage == 0
    if isinstance(two.engine.pages, RankPages):
        assert two.engine.pages.num_pages == 40
        assert all(part.idle > 0 for part in two.engine.pages.parts), "requests were to spread over ranks"


def test_sequences_are_preempted(one: LLM, two: LLM) -> None:
    before = statistics(two).preemptions
    assert_alike(one, two, [prompt(80 + count, 13 + count) for count in range(8)], greedy(24))
    assert statistics(two).preemptions > before


def test_sampling_is_alike(one: LLM, two: LLM) -> None:
    """By seeds, filters, penalties and bias, beside each other."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -3.0}, "min_tokens": 8, "stop_token_ids": [1]},
    ]
    params = [SamplingParams(seed=5, max_tokens=24, **kind) for kind in kinds for _ in range(3)]
    assert_alike(one, two, [prompt(20), prompt(31, 5), prompt(9, 3)] * 4, params)


def test_log_probabilities_are_alike(layout: Layout, one: LLM, two: LLM) -> None:
    """Those of prompts, of the likeliest 20 ids of each token and of one, beside a request for none."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    scored, some = SamplingParams(**common, logprobs=20, prompt_logprobs=20), SamplingParams(**common, logprobs=1)
    prompts, params = [prompt(70, 17), prompt(50, 19), prompt(5), prompt(9, 5)], [scored, some, greedy(24), scored]
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
    assert ids(found) == ids(expected)
    pairs = []
    for wanted, given in zip(expected, found, strict=True):
        pairs += zip((wanted.prompt_logprobs or [])[1:], (given.prompt_logprobs or [])[1:], strict=True)
        pairs += zip(wanted.outputs[0].logprobs or [], given.outputs[0].logprobs or [], strict=True)
    assert len(pairs) == (69 + 8) + 8 + (8 + 8)
    for theirs, own in pairs:
        assert theirs is not None
        assert own is not None
        assert theirs.keys() == own.keys()
        for id, entry in theirs.items():
            assert own[id].logprob == pytest.approx(entry.logprob, abs=layout.close)
            assert own[id].rank == entry.rank


@of("tensor", "stages", "prefill context", "attention dp")
def test_outputs_follow_a_grammar_beside_others(one: LLM, two: LLM) -> None:
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar), greedy(24)]
    outputs = [llm.generate(["Ann is 31.", "Count:"], params, use_tqdm=False) for llm in (one, two)]
    assert ids(outputs[1]) == ids(outputs[0])
    assert isinstance(json.loads(outputs[1][0].outputs[0].text), dict)


class Id(int):
    """An integer that msgspec does not encode."""


def test_ids_of_other_kinds_end_nothing(one: LLM, two: LLM) -> None:
    for ask in (two.generate, two.embed):
        with pytest.raises(ValueError, match="must be integers, got True"):
            ask([[True, 2]], use_tqdm=False)
    assert_alike(one, two, [[Id(7), 3]], greedy(24))
    assert len(two.embed([[Id(7), 3]], use_tqdm=False)) == 1


def test_embeddings_are_alike(one: LLM, two: LLM) -> None:
    prompts = [prompt(40), prompt(7, 3), prompt(12, 5)]
    for pooling in ("last", "mean"):
        vectors = [
            torch.tensor([output.outputs.embedding for output in llm.embed(prompts, pooling, use_tqdm=False)])
            for llm in (one, two)
        ]
        torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)


def test_a_stream_that_is_left_and_an_interrupt_leave_the_ranks_together(one: LLM, two: LLM) -> None:
    stream = two.stream({"prompt_token_ids": prompt(100, 19)}, greedy(24))
    next(stream)
    stream.close()
    assert not two.engine.loop.scheduler.has_work
    assert_alike(one, two, [prompt(33, 23)], greedy(24))
    for delay in (0.03, 0.1, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([prompt(90, 29), prompt(40, 31)] * 8, greedy(64), use_tqdm=False)
        timer.join()
    assert_alike(one, two, [prompt(37, 23), prompt(33, 21)], greedy(24))
    assert_same_ids(two)


def test_each_rank_has_its_share_of_weights_and_pages(layout: Layout, one: LLM, two: LLM) -> None:
    whole, own = one.engine.ledger, two.engine.ledger
    assert layout.weights[0] <= own.weights / whole.weights <= layout.weights[1]
    assert layout.kv[0] <= own.kv / whole.kv <= layout.kv[1]
    assert two.engine.config == one.engine.config


def test_a_second_engine_over_ranks_is_refused(layout: Layout, options: dict[str, Any], two: LLM) -> None:
    with pytest.raises(ValueError, match="belongs to a process group"):
        layout.over_ranks(options)


@of("tensor")
def test_messages_travel_beside_products_in_large_steps(one: LLM, two: LLM, ran: list[tuple[str, int, bool]]) -> None:
    two.generate([prompt(62, 19)], greedy(2), use_tqdm=False)
    assert ran == [("overlapped_logits", 48, False), ("logits", 14, False), ("logits", 1, False)]


@of("prefill context")
def test_prompts_are_divided_where_no_rank_needs_all_their_tokens(
    one: LLM, two: LLM, ran: list[tuple[str, int, bool]]
) -> None:
    # Own and gathered keys and values of a layer, of shares of up to 24 tokens, two chunks not cut, and padding.
    token = one.engine.ledger.page_bytes // 16 // one.engine.config.num_layers
    assert two.engine.ledger.messages == (1 + 2) * (24 + 16 + 16) * token
    two.generate([prompt(60, 31), prompt(60, 37)], greedy(4), use_tqdm=False)
    assert {divided for _, tokens, divided in ran if tokens > 8} == {True}
    assert {divided for _, tokens, divided in ran if tokens <= 2} == {False}
    ran.clear()
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    two.generate([prompt(70, 29)], scored, use_tqdm=False)
    assert not any(divided for _, _, divided in ran)


@of("decode context", "decode context of latents")
def test_chunks_gather_keys_and_decodes_their_queries(one: LLM, two: LLM, ran: list[tuple[str, int, bool]]) -> None:
    assert [llm.engine.ledger.tokens for llm in (one, two)] == [576, 576]
    two.generate([prompt(130, 41)], greedy(24), use_tqdm=False)
    assert {name for name, tokens, _ in ran if tokens > 8} == {"gathered_logits"}
    assert {name for name, tokens, _ in ran if tokens == 1} == {"logits"}


@of("attention dp")
def test_each_rank_has_its_experts_and_all_else(one: LLM, two: LLM) -> None:
    sizes = {name: value.numel() for name, value in one.engine.model.named_parameters()}
    own = {name: value.numel() for name, value in two.engine.model.named_parameters()}
    assert own.keys() == sizes.keys()
    for name, size in sizes.items():
        assert own[name] == (size * 2 // 5 if ".experts." in name else size), name
    two.engine.loop.scheduler.check()


def test_tensors_travel_between_ranks_as_they_are() -> None:
    """Whatever their strides, of any dtype, and without elements."""
    whole = torch.randn(5, 21)
    for tensor in (
        whole,
        whole.t(),
        whole[1:2, 3:4],
        whole[:, :0],
        whole.bfloat16()[1:, ::2],
        whole.int()[0],
        whole > 0,
    ):
        sent = messages.encoder()(messages.Vectors(3, tensor))
        found = messages.decoder(messages.ToLeader)(sent).vectors
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
