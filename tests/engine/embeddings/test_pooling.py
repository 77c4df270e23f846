"""Vectors of prompts, against the hidden states that transformers computes for each prompt alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from strata import LLM, SamplingParams
from tests.engine.test_failed_requests import NAN_TOKEN, break_embedding

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
