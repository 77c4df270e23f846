"""Vectors of prompts against transformers' hidden states; how embeddings and generations share an engine's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from strata import LLM, SamplingParams
from strata.engine.embeddings.pooling import EmbeddingQueue, Pooler, PoolRequest
from tests.engine.test_faults import NAN_TOKEN, break_embedding

PROMPTS = [[1, 2, 3], list(range(60)), [7], [5, 5, 5, 5], list(range(200, 240))]


def reference_vector(model: LlamaForCausalLM, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = states[-1] if pooling == "last" else states.mean(0)
    return pooled / pooled.norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [60, 512], ids=["several batches", "one batch"])
def test_vectors_equal_transformers(
    engine: Callable[..., LLM], reference: LlamaForCausalLM, pooling: str, budget: int, deterministic: bool
) -> None:
    llm = engine(dtype="float32", max_num_batched_tokens=budget, deterministic=deterministic)
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        want = reference_vector(reference, output.prompt_token_ids, pooling)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=2e-5, rtol=1e-4)
        assert math.sqrt(sum(x * x for x in output.outputs.embedding)) == pytest.approx(1, abs=1e-5)


def test_text_is_encoded_and_generation_goes_on_as_before(engine: Callable[..., LLM]) -> None:
    llm = engine(dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = llm.generate("the quick", params, use_tqdm=False)[0].outputs[0].token_ids
    text, ids = llm.embed(["the quick", llm.get_tokenizer().encode("the quick")], use_tqdm=False)
    assert text.outputs == ids.outputs
    assert (text.prompt, ids.prompt) == ("the quick", None)
    llm.engine.loop.scheduler.check()
    assert llm.generate("the quick", params, use_tqdm=False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([307], "out of range"),
        ([1] * 257, "max_model_len is 256"),
        ([1] * 101, "at most 100: shorten it, or raise max_num_batched_tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(engine: Callable[..., LLM], prompt: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(dtype="float32", max_num_batched_tokens=100).embed({"prompt_token_ids": prompt}, use_tqdm=False)


def test_pooling_is_last_or_mean(engine: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="'last' or 'mean', got 'cls'"):
        engine(dtype="float32").embed("fox", pooling="cls", use_tqdm=False)  # type: ignore[arg-type]


def test_a_vector_of_nan_is_an_error(folder: Path, tmp_path: Path) -> None:
    llm = LLM(break_embedding(folder, tmp_path), device="cpu", dtype="float32", num_pages=100)
    with pytest.raises(ValueError, match="NaN"):
        llm.embed({"prompt_token_ids": [1, NAN_TOKEN]}, use_tqdm=False)


TOKENS, SECONDS_A_TOKEN, SECONDS_A_STEP = 800, 2**-12, 0.01


class Machine:
    """A clock, and a pooler that takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds_a_token = SECONDS_A_TOKEN
        self.batches: list[int] = []
        self.queue = EmbeddingQueue(self, lambda: self.now)  # type: ignore[arg-type]
        self._fitting = Pooler.fitting

    def check(self, prompt: Sequence[int]) -> None:
        pass

    def fitting(self, requests: Any, token_limit: float = math.inf) -> int:
        return self._fitting(SimpleNamespace(_max_tokens=TOKENS), requests, token_limit)  # type: ignore[arg-type]

    def launch(self, requests: Sequence[PoolRequest]) -> Any:
        tokens = sum(len(request.prompt) for request in requests)
        self.batches.append(tokens)
        self.now += tokens * self.seconds_a_token
        return SimpleNamespace(ended=True, wait=lambda: torch.zeros(len(requests), 1))

    def add(self, count: int, length: int) -> None:
        for number in range(count):
            self.queue.add((b"client", f"{len(self.batches)}-{number}"), PoolRequest([1] * length, "last"))

    def steps(self, count: int, generating: bool) -> float:
        """Seconds of the steps."""
        start = self.now
        for _ in range(count):
            self.queue.launch(beside_generations=generating)
            self.now += SECONDS_A_STEP if generating else 0.0
            list(self.queue.collect(wait=not generating))
        return self.now - start


def test_generations_keep_three_quarters_of_the_time_however_many_embeddings_wait() -> None:
    machine = Machine()
    machine.add(5000, 25)
    machine.steps(10, generating=True)
    took = machine.steps(1000, generating=True)
    assert 1000 * SECONDS_A_STEP / took > 0.7
    assert max(machine.batches) * SECONDS_A_TOKEN <= 0.03
    assert len(machine.batches) > 20  # and embeddings go on


def test_alone_they_take_what_a_step_holds_or_a_tenth_of_a_second() -> None:
    machine = Machine()
    machine.add(256, 25)
    machine.steps(4, generating=False)
    assert machine.batches == [25, 400, 400, 400]  # the first tells how fast the machine is
    machine.seconds_a_token /= 8
    machine.steps(2, generating=False)
    assert machine.batches[4:] == [400, TOKENS]


def test_one_that_takes_longer_runs_alone() -> None:
    machine = Machine()
    machine.add(3, 400)
    machine.steps(1, generating=True)
    assert machine.batches == [400]
