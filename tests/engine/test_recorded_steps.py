"""Recorded steps on a CPU, where a recording is a function that is called again: same ids as launched eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape
from strata.engine import recorded_steps
from strata.engine.plan import StepPlan
from strata.engine.recorded_steps import (
    decode_buckets,
    max_mixed_tokens,
    mixed_buckets,
    recorded_sizes,
    smallest_mixed,
)

MOST, LONGEST = 8, 96
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": MOST, "max_num_batched_tokens": LONGEST, "seed": 1}


class Replayed:
    """In place of `CudaGraphs`. What a recording reads must stay where it was, so nothing is told to it again."""

    def __init__(self) -> None:
        self.runs: dict[Hashable, Callable[[], None]] = {}
        self.replayed: list[Hashable] = []

    def record(self, key: Hashable, run: Callable[[], None], warm: bool = False) -> None:
        run()
        self.runs[key] = run

    def replay(self, key: Hashable) -> None:
        self.replayed.append(key)
        self.runs[key]()


@pytest.fixture
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Replayed]:
    """An engine whose steps are all recorded, and whose device has memory of its own, as on CUDA."""
    graphs = Replayed()
    monkeypatch.setattr(recorded_steps, "CudaGraphs", lambda: graphs)
    monkeypatch.setattr(recorded_steps, "non_owning_view", lambda tensor: tensor)
    monkeypatch.setattr(Staging, "target", lambda self, size: torch.full((size,), -77, dtype=torch.int32))
    monkeypatch.setattr(Staging, "send", lambda self, target: target.copy_(self.host[: len(target)]))
    llm = LLM(folder, **OPTIONS)
    runner = llm.engine.loop._runner
    tables = runner._tables
    tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
    for _ in runner.record(recorded_sizes(MOST, LONGEST, 10**6)):
        pass
    return llm, graphs


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(250) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 90, 200]))] for _ in range(30)]
    shared = [draw.randrange(250) for _ in range(48)]
    prompts += [shared + prompt[:20] for prompt in prompts[:8]]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.9]),
            seed=number,
            max_tokens=draw.randrange(1, 20),
            ignore_eos=True,
            n=draw.choice([1, 1, 1, 3]),
            top_k=draw.choice([0, 5]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        )
        for number in range(len(prompts))
    ]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def ids(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(*requests(), use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_the_same_ids_as_eagerly(recorded: tuple[LLM, Replayed], folder: Path) -> None:
    llm, graphs = recorded
    wanted = ids(LLM(folder, **OPTIONS))
    assert ids(llm) == wanted
    sizes = {key[0] for key in graphs.replayed}
    assert len(sizes) > 3
    assert {key[1] for key in graphs.replayed} == {"run", "draw"}


@pytest.mark.parametrize("most", [256, 512, 1024])
def test_every_size_holds_what_it_promises_and_wastes_little(most: int) -> None:
    sizes = mixed_buckets(most, 5632)  # of the 0.6B shape
    assert sizes == sorted(set(sizes), key=lambda size: (size.tokens, size.sequences))
    assert len(sizes) < (80 if most == 256 else 105)  # each takes memory and start-up time
    for tokens in (*range(2, 1100), *range(1100, 5632, 7), 5632):
        for sequences in (1, 16, 64, min(256, tokens - 1), min(most, tokens - 1)):
            size = smallest_mixed(sizes, tokens, sequences, sequences)
            assert size is not None
            assert size.tokens >= tokens
            assert size.sequences > sequences  # padding finds a sequence to belong to
            assert size.sequences < size.tokens  # and no size is taken for one of decodes
            if tokens > max(256, 2 * sequences):
                assert size.tokens <= 1.25 * tokens
    assert smallest_mixed(sizes, 5633, 1, 1) is None
    assert smallest_mixed(sizes, 600, 100, most + 1) is None


def test_steps_are_recorded_while_they_are_short_for_their_model() -> None:
    assert [max_mixed_tokens(parameters) for parameters in (10**6, 600 * 10**6, 8 * 10**9)] == [3_499_520, 5632, 2048]
    sizes = recorded_sizes(256, 8192, 8 * 10**9)
    assert max(size.tokens for size in sizes) == 2048


@pytest.mark.parametrize("longest", [77, 300, 2000, 2048])
def test_the_largest_step_is_recorded(longest: int) -> None:
    sizes = mixed_buckets(16, longest)
    assert smallest_mixed(sizes, longest, 16, 16) == sizes[-1]
    assert sizes[-1].tokens == longest


@pytest.mark.parametrize("most", [1, 31, 32, 33, 200])
def test_no_size_is_larger_than_a_step_may_be(most: int) -> None:
    for size in mixed_buckets(most, 100):
        assert size.tokens <= 100
        assert size.draws <= most
    assert decode_buckets(most)[-1] == most


@pytest.mark.parametrize(("sequences", "tokens"), [(8, 4), (64, 16), (256, 128), (256, 255), (4, 1)])
def test_steps_of_fewer_tokens_than_sequences_fit_into_their_buffers(sequences: int, tokens: int) -> None:
    sizes = recorded_sizes(sequences, tokens, 10**9)
    largest = BufferShape(tokens, sequences + 1, sequences).size
    assert max(size.size for size in sizes) <= largest
    assert max(size.tokens for size in sizes) == tokens


def test_only_the_prompt_of_a_scored_sequence_is_launched_eagerly(
    recorded: tuple[LLM, Replayed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = recorded
    eager: list[StepPlan] = []
    runner: Any = llm.engine.loop._runner
    launch = runner._launch_eager
    monkeypatch.setattr(runner, "_launch_eager", lambda plan, arrays: eager.append(plan) or launch(plan, arrays))
    # The second prompt comes in chunks beside the first request, which decodes then.
    prompts = [{"prompt_token_ids": [7] * 20}, {"prompt_token_ids": [9] * 230}]
    params = [
        SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=scored, ignore_eos=True) for scored in (1, None)
    ]
    found, wanted = (one.generate(prompts, params, use_tqdm=False) for one in (llm, LLM(folder, **OPTIONS)))
    assert [plan.chunks[0].start for plan in eager] == [0]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.prompt_logprobs == other.prompt_logprobs
