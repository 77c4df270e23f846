"""Configs of gpt-oss, for `tests.models.checkpoints`."""

from __future__ import annotations

from functools import partial

from .later_checkpoints import IDS, Config, family, sizes

_gpt_oss = partial(family, "GptOss", "gpt_oss", **IDS)
# fmt: off
GPT_OSS_CONFIGS: list[tuple[str, Config]] = [
    ("gpt-oss-yarn", _gpt_oss(
        **sizes(101, 64, 32, 4, 7, 1), head_dim=16, max_position_embeddings=256, initial_context_length=64,
        sliding_window=9, num_local_experts=5, num_experts_per_tok=2, experts_per_token=2, rope_theta=150000,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64}, swiglu_limit=0.7, output_router_logits=False, router_aux_loss_coef=0.9,
    )),
    ("gpt-oss-no-biases-tied", _gpt_oss(
        **sizes(97, 36, 28, 2, 6, 2), head_dim=10, max_position_embeddings=128, attention_bias=False,
        layer_types=["full_attention", "sliding_attention"], sliding_window=5, num_local_experts=3,
        num_experts_per_tok=3, swiglu_alpha=1.3, tie_word_embeddings=True, rope_parameters={"rope_type": "default",
        "rope_theta": 20000.0}, torch_dtype="float32",
    )),
    ("gpt-oss-no-windows", _gpt_oss(
        **sizes(83, 48, 20, 3, 4, 4), head_dim=16, max_position_embeddings=128, layer_types=["full_attention"] * 3,
        num_local_experts=8, num_experts_per_tok=1, rope_parameters={"rope_type": "linear", "rope_theta": 20000.0,
        "factor": 2.0},
    )),
]
# fmt: on
