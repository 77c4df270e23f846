"""Configs of the families beyond Llama, Mistral and Qwen, for `tests.models.checkpoints`."""

from __future__ import annotations

from functools import partial
from typing import Any

Config = dict[str, Any]


def sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def family(name: str, model_type: str, **own: Any) -> Config:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type} | own


IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
_smollm3 = partial(family, "SmolLM3", "smollm3")
_olmo2, _olmo3 = (partial(family, name, name.lower(), **IDS) for name in ("Olmo2", "Olmo3"))
_phi3 = partial(family, "Phi3", "phi3", **IDS | {"bos_token_id": 1})
_gemma3 = partial(family, "Gemma3", "gemma3_text", head_dim=16, bos_token_id=2, eos_token_id=1, pad_token_id=None)
_glm4_moe = partial(family, "Glm4Moe", "glm4_moe", **IDS)


# fmt: off
LATER_CONFIGS: list[tuple[str, Config]] = [
    ("smollm3-tied", _smollm3(
        **sizes(131, 56, 74, 5, 7, 1), head_dim=16, max_position_embeddings=128, rope_theta=5000000.0,
        no_rope_layer_interval=2, use_sliding_window=False, sliding_window=None, pad_token_id=None, bos_token_id=1,
        eos_token_id=2,
    )),
    ("smollm3-biases-window", _smollm3(
        **sizes(97, 36, 50, 3, 6, 2), max_position_embeddings=128, attention_bias=True, mlp_bias=True,
        no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=[2, 5],
    )),
    ("smollm3-yarn", _smollm3(
        **sizes(83, 48, 66, 4, 4, 4), max_position_embeddings=256, layer_types=["full_attention"] * 4,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64}, pad_token_id=3, bos_token_id=1, eos_token_id=2, dtype="float32",
    )),
    ("olmo2-odd", _olmo2(
        **sizes(101, 56, 74, 2, 7, 1), max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=500000.0,
        torch_dtype="float32",
    )),
    ("olmo2-biases-tied", _olmo2(
        **sizes(97, 36, 50, 3, 6, 2), head_dim=10, max_position_embeddings=128, attention_bias=True,
        tie_word_embeddings=True, rope_scaling={"rope_type": "linear", "factor": 2.0},
    )),
    ("olmo2-yarn", _olmo2(
        **sizes(83, 48, 66, 2, 4, None), max_position_embeddings=256, rope_parameters={"rope_type": "yarn",
        "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    )),
    ("phi3-partial-window", _phi3(
        **sizes(101, 56, 75, 2, 7, 1), max_position_embeddings=128, original_max_position_embeddings=128,
        partial_rotary_factor=0.75, sliding_window=9, resid_pdrop=0.0, embd_pdrop=0.0, rope_theta=5000.0,
    )),
    # Every sequence of two tokens is longer than the original length.
    ("phi3-longrope-long", _phi3(
        **sizes(97, 40, 50, 3, 5, None), max_position_embeddings=128, original_max_position_embeddings=1,
        rope_scaling={"type": "longrope", "attention_factor": 1.2, "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 1.5, 2.0, 7.5]}, torch_dtype="float32",
    )),
    ("phi3-longrope-short-partial-tied", _phi3(
        **sizes(83, 48, 66, 2, 6, 3), max_position_embeddings=128, original_max_position_embeddings=128,
        tie_word_embeddings=True, rope_parameters={"rope_type": "longrope", "rope_theta": 20000.0,
        "partial_rotary_factor": 0.5, "factor": 4.0, "original_max_position_embeddings": 128, "short_factor": [1.0,
        1.25], "long_factor": [3.0, 9.0]},
    )),
    ("olmo3-yarn", _olmo3(
        **sizes(101, 56, 75, 4, 7, 1), max_position_embeddings=256, sliding_window=9, rope_scaling={"rope_type": "yarn",
        "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}, torch_dtype="float32",
    )),
    ("olmo3-layer-types-bases", _olmo3(
        **sizes(97, 36, 50, 3, 6, 2), max_position_embeddings=128, attention_bias=True, sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
    )),
    ("olmo3-no-windows-tied", _olmo3(
        **sizes(83, 48, 66, 2, 4, None), layer_types=["full_attention"] * 2, max_position_embeddings=128,
        tie_word_embeddings=True,
    )),
    ("gemma3-local-global", _gemma3(
        **sizes(101, 42, 75, 4, 7, 1), max_position_embeddings=128, sliding_window=7, sliding_window_pattern=2,
        query_pre_attn_scalar=24, rope_theta=1000000.0, rope_local_base_freq=5000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, attn_logit_softcapping=None, final_logit_softcapping=None,
        torch_dtype="float32",
    )),
    ("gemma3-softcap-untied-biases", _gemma3(
        **sizes(97, 36, 50, 3, 6, 2), max_position_embeddings=128, attention_bias=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    )),
    ("gemma3-bases", _gemma3(
        **sizes(83, 48, 66, 2, 4, 4), max_position_embeddings=256, sliding_window=16, sliding_window_pattern=6,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}},
    )),
    ("glm4-moe-groups", _glm4_moe(
        **sizes(101, 56, 75, 3, 7, 1), head_dim=16, max_position_embeddings=128, attention_bias=True, use_qk_norm=True,
        n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1, num_nextn_predict_layers=1,
        torch_dtype="float32",
    )),
    ("glm4-moe-tied-unnormalized", _glm4_moe(
        **sizes(97, 36, 50, 2, 6, 2), max_position_embeddings=128, partial_rotary_factor=1.0, n_routed_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=False, first_k_dense_replace=0,
        tie_word_embeddings=True,
    )),
    ("glm4-moe-all-dense-but-last", _glm4_moe(
        **sizes(83, 48, 66, 3, 4, 4), max_position_embeddings=128, n_routed_experts=6, num_experts_per_tok=6,
        moe_intermediate_size=8, first_k_dense_replace=2, rope_parameters={"rope_type": "linear", "rope_theta": 20000.0,
        "factor": 2.0, "partial_rotary_factor": 0.5},
    )),
]
# fmt: on
