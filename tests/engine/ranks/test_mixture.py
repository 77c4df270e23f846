"""A mixture of experts over ranks: each has a part of every expert, or different ones, and all answer as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 5,  # two ranks have three and two
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 513,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "attention_bias": False,
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_pages": 64,
    "seed": 0,
    "verbose": False,
}
PROMPTS = [[(7 * place + 3) % 513 for place in range(length)] for length in (40, 5)]


def ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_share_a_mixture(tmp_path: Path, expert_parallel: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    wanted = ids(LLM(tmp_path, **OPTIONS))
    two = LLM(tmp_path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel, **OPTIONS)
    assert ids(two) == wanted
    assert two.engine.ranks is not None
    two.engine.ranks.check_ids()


def test_experts_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel=True needs a mixture of experts"):
        LLM(device="cpu", tensor_parallel_size=2, enable_expert_parallel=True, verbose=False)
