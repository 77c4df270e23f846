"""Ranks with sequences of their own and a share of the experts each answer as one rank does, whatever is asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.outputs import RequestOutput
from strata.engine.scheduling.rank_schedulers import RankPages, RankSchedulers
from strata.models.folder import located

from .test_mixture import CONFIG

# Few pages and short steps: prompts are computed in chunks, and sequences are preempted.
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "num_pages": 20,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "seed": 0,
    "verbose": False,
}
RANKED: dict[str, Any] = {"enable_expert_parallel": True, "enable_dp_attention": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of five experts with random weights and the tokenizer of the built-in model."""
    made, own = tmp_path_factory.mktemp("mixture"), Path(located(None))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(own / name, made)
    size = json.loads((own / "config.json").read_text())["vocab_size"]
    (made / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> LLM:
    return LLM(folder, **OPTIONS | {"num_pages": 80})


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, tensor_parallel_size=2, **RANKED, **OPTIONS)
    yield llm
    schedulers(llm).check()


def schedulers(llm: LLM) -> RankSchedulers:
    found = llm.engine.loop.scheduler
    assert isinstance(found, RankSchedulers)
    return found


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * place + 3) % 300 for place in range(length)]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_alike(one: LLM, two: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    expected = one.generate(prompts, params, use_tqdm=False)
    assert ids(two.generate(prompts, params, use_tqdm=False)) == ids(expected)


def test_long_prompts_come_in_chunks_and_are_found_again_where_they_are(one: LLM, two: LLM) -> None:
    assert_alike(one, two, [prompt(130), prompt(3), prompt(70, 11)], GREEDY)
    pages = two.engine.pages
    assert isinstance(pages, RankPages)
    assert all(part.idle > 0 for part in pages.parts), "requests were to spread over ranks"
    before = schedulers(two).statistics.prefix_hits
    assert_alike(one, two, [prompt(130)], GREEDY)
    assert schedulers(two).statistics.prefix_hits >= before + 128
    assert pages.num_pages == 40
    assert pages.usage == 0


def test_sequences_are_preempted_on_the_rank_that_has_them(one: LLM, two: LLM) -> None:
    before = schedulers(two).statistics.preemptions
    assert_alike(one, two, [prompt(60 + count, 13 + count) for count in range(12)], GREEDY)
    assert schedulers(two).statistics.preemptions > before


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "n": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 4.0}, "min_tokens": 8},
    ],
    ids=["filters", "penalties"],
)
def test_sampling_is_alike(one: LLM, two: LLM, sampling: dict[str, Any]) -> None:
    assert_alike(one, two, [prompt(20), prompt(31, 5), prompt(9, 3)], SamplingParams(seed=5, max_tokens=24, **sampling))


def test_log_probabilities_come_from_all_ranks(one: LLM, two: LLM) -> None:
    scored = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    some = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    prompts, params = [prompt(60, 17), prompt(50, 19), prompt(5), prompt(9, 5)], [scored, some, GREEDY, scored]
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
    assert ids(found) == ids(expected)
    compared = 0
    for wanted, given in zip(expected, found, strict=True):
        lists = [
            (wanted.prompt_logprobs, given.prompt_logprobs),
            (wanted.outputs[0].logprobs, given.outputs[0].logprobs),
        ]
        for theirs, own in lists:
            for their, mine in zip(theirs or [], own or [], strict=True):
                assert (their or {}).keys() == (mine or {}).keys()
                for id, entry in (their or {}).items():
                    assert mine is not None
                    assert mine[id].logprob == pytest.approx(entry.logprob, abs=1e-5)
                    assert mine[id].rank == entry.rank
                    compared += 1
    assert compared > 2 * (59 + 8) + 3 * 8


def test_outputs_follow_a_grammar_beside_others(one: LLM, two: LLM) -> None:
    grammar = StructuredOutputsParams(regex="[a-z]{3}-[0-9]{4}")
    held = SamplingParams(temperature=0, max_tokens=30, structured_outputs=grammar)
    params = [held, GREEDY, GREEDY, held, held]
    prompts = [prompt(10 + count, 3 + count) for count in range(5)]
    outputs = [llm.generate(prompts, params, use_tqdm=False) for llm in (one, two)]
    assert ids(outputs[1]) == ids(outputs[0])
    for index in (0, 3, 4):
        assert re.fullmatch("[a-z]{3}-[0-9]{4}", outputs[1][index].outputs[0].text)


def test_embeddings_are_alike(one: LLM, two: LLM) -> None:
    prompts = [prompt(40), prompt(7, 3)]
    vectors = [
        torch.tensor([output.outputs.embedding for output in llm.embed(prompts, "mean", use_tqdm=False)])
        for llm in (one, two)
    ]
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=0)


def test_a_stream_that_is_left_and_an_interrupt_leave_the_ranks_together(one: LLM, two: LLM) -> None:
    stream = two.stream({"prompt_token_ids": prompt(100, 19)}, GREEDY)
    next(stream)
    stream.close()
    assert not schedulers(two).has_work
    for delay in (0.05, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.generate([prompt(90, 29), prompt(40, 31)] * 8, LONG, use_tqdm=False)
        timer.join()
    assert_alike(one, two, [prompt(37, 23), prompt(33, 21)], GREEDY)


def test_each_rank_has_its_experts_and_all_else(one: LLM, two: LLM) -> None:
    sizes = {name: value.numel() for name, value in one.engine.model.named_parameters()}
    own = {name: value.numel() for name, value in two.engine.model.named_parameters()}
    assert own.keys() == sizes.keys()
    for name, size in sizes.items():
        assert own[name] == (size * 2 // 5 if ".experts." in name else size), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_dp_attention": True}, "needs enable_expert_parallel=True and a tensor_parallel_size over 1"),
        ({"enable_dp_attention": True, "tensor_parallel_size": 2}, "for engines that share nothing give data_parallel"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("8B", **options)


def test_a_dense_model_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ValueError, match=r"needs a mixture of experts.* give data_parallel_size instead"):
        LLM(tensor_parallel_size=2, **RANKED, device="cpu", verbose=False)
