"""Configs of DeepSeek-V2 and V3, for `tests.models.checkpoints`."""

from __future__ import annotations

from typing import Any

from .later_checkpoints import IDS, Config, family, sizes


def _deepseek(version: int, **own: Any) -> Config:
    return family(f"DeepseekV{version}", f"deepseek_v{version}", **IDS | own)


def _latent(query: int | None, rank: int, nope: int, rope: int, value: int) -> Config:
    sizes = {"kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    return {"q_lora_rank": query} | sizes


# fmt: off
DEEPSEEK_CONFIGS: list[tuple[str, Config]] = [
    # YaRN as DeepSeek-V2-Lite has it: scores are warmed, cosines are not.
    ("deepseek-v2-lite-yarn", _deepseek(
        2, **sizes(101, 56, 75, 3, 7, 7), **_latent(None, 24, 10, 6, 14), max_position_embeddings=256,
        n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2,
        first_k_dense_replace=1, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}, torch_dtype="float32",
    )),
    ("deepseek-v2-groups-biases-wide-values", _deepseek(
        2, **sizes(97, 36, 50, 2, 6, None), **_latent(20, 16, 8, 4, 13), max_position_embeddings=128,
        attention_bias=True, mlp_bias=True, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=12,
        n_shared_experts=1, topk_method="group_limited_greedy", n_group=4, topk_group=2, norm_topk_prob=False,
        routed_scaling_factor=16.0, rms_norm_eps=1e-3, tie_word_embeddings=True,
    )),
    ("deepseek-v3-groups-yarn", _deepseek(
        3, **sizes(101, 56, 75, 3, 7, 7), **_latent(20, 24, 10, 6, 14), num_nextn_predict_layers=0,
        max_position_embeddings=256, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=12,
        n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1, rms_norm_eps=1e-3,
        rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 0.5},
    )),
    ("deepseek-v3-halves-biases", _deepseek(
        3, **sizes(97, 36, 50, 2, 6, 6), **_latent(None, 16, 8, 4, 12), max_position_embeddings=128,
        attention_bias=True, rope_interleave=False, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
        n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0, first_k_dense_replace=0,
        tie_word_embeddings=True,
    )),
]
# fmt: on
# A third of each, for conformance alone: what graphs do of a family two show.
# fmt: off
THIRD_CONFIGS: list[tuple[str, Config]] = [
    # Queries of a latent, narrow values, all layers sparse, every expert of a token but one.
    ("deepseek-v2-odd-linear", _deepseek(
        2, **sizes(83, 40, 46, 2, 5, 5), **_latent(18, 14, 10, 8, 7), max_position_embeddings=128, n_routed_experts=5,
        num_experts_per_tok=4, moe_intermediate_size=8, n_shared_experts=3, topk_method="greedy",
        routed_scaling_factor=0.7, first_k_dense_replace=0, rope_parameters={"rope_type": "linear",
        "rope_theta": 20000.0, "factor": 2.0},
    )),
    # A group of each two experts, all of them kept; one dense layer behind which one is sparse.
    ("deepseek-v3-pairs-linear", _deepseek(
        3, **sizes(83, 40, 46, 2, 5, None), **_latent(18, 14, 9, 8, 6), max_position_embeddings=128,
        n_routed_experts=10, num_experts_per_tok=7, moe_intermediate_size=8, n_shared_experts=3, n_group=5,
        topk_group=5, norm_topk_prob=True, routed_scaling_factor=1.7, first_k_dense_replace=1,
        rope_parameters={"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
    )),
]
# fmt: on
