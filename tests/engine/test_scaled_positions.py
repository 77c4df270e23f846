"""A checkpoint whose rotary embedding is scaled takes prompts beyond max_position_embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from strata import LLM, SamplingParams


@pytest.mark.parametrize(
    "scaling",
    [
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },  # Qwen's recipe, 1,024 times smaller
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_long_prompts_are_answered_as_by_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        rope_scaling=dict(scaling),
        initializer_range=0.3,
    )
    oracle = Qwen2ForCausalLM(config).eval()
    oracle.save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="float32", num_pages=40, skip_tokenizer_init=True, verbose=False)
    assert llm.engine.max_model_len == 128
    prompt = [(7 * place) % 300 for place in range(110)]
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert output.token_ids == want[0, len(prompt) :].tolist()


def test_a_length_over_the_longest_is_refused_with_its_reason(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
                         rope_scaling=scaling)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"longest sequence of 128 tokens: max_position_embeddings=32.*'yarn'"):
        LLM(tmp_path, device="cpu", max_model_len=129, skip_tokenizer_init=True)
