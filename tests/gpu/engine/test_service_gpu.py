"""The engine process on CUDA, where steps run ahead: tokens, embeddings beside steps, and pages that come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from strata import LLM
from strata.engine.process.messages import Abort, Add, Embed, Embedding
from tests.engine.embeddings.test_pooling import PROMPTS, reference_vector
from tests.engine.process.desk import GREEDY, A, B, Desk, generated

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_equal_transformers(
    folder: Path, reference: LlamaForCausalLM, pooling: str, deterministic: bool
) -> None:
    llm = LLM(folder, deterministic=deterministic, **OPTIONS)
    for output in llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], pooling=pooling, use_tqdm=False):  # type: ignore[arg-type]
        want = reference_vector(reference, output.prompt_token_ids, pooling)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=1e-4, rtol=1e-3)


def test_embeddings_and_aborts_disturb_no_generation(folder: Path) -> None:
    llm = LLM(folder, deterministic=True, **OPTIONS)
    long = replace(GREEDY, max_tokens=60)
    desk = Desk(llm, A, B)
    desk.say(A, Add("a", [5, 6, 7], long), *(Embed(f"{i}", ids, "mean") for i, ids in enumerate(PROMPTS)))
    desk.say(B, Add("a", [8, 9], replace(long, n=3)), Add("b", list(range(150)), long))
    desk.steps(2)
    desk.say(B, Abort(["a", "b"]))
    desk.run()
    assert desk.ids(A) == generated(llm, [5, 6, 7], long)[0]
    assert not [delta for delta in desk.deltas(B) if delta.finish_reason is not None]
    assert llm.engine.pages.usage == 0
    told = {embedding.id: np.frombuffer(embedding.values, "<f4").tolist() for embedding in desk.of(A, Embedding)}
    want = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], pooling="mean", use_tqdm=False)
    assert [told[f"{i}"] for i in range(len(PROMPTS))] == [output.outputs.embedding for output in want]
