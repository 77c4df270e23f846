"""Small random models with experts: their configs, and the same weights in transformers and in Strata."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.layers import CausalLM

from .later_checkpoints import Config, family, sizes

_SIZES = sizes(83, 40, 28, 2, 6, 2) | {"head_dim": 12, "max_position_embeddings": 128}
_MIXTRAL = family("Mixtral", "mixtral", **_SIZES)
_QWEN = family("Qwen3Moe", "qwen3_moe", **_SIZES, moe_intermediate_size=20)

SPARSE_CONFIGS: dict[str, Config] = {
    "mixtral": _MIXTRAL | {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_theta": 5000.0},
    "mixtral-window-tied": _MIXTRAL
    | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5, "tie_word_embeddings": True},
    "qwen3-moe": _QWEN | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen3-moe-dense-layers-biases": _QWEN
    | {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
    },
}


def pair(name: str) -> tuple[CausalLM, PreTrainedModel]:
    """The model, and transformers' with the same weights; norms and biases are random too."""
    values = SPARSE_CONFIGS[name]
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="eager").eval()
    model = build(config_from_dict(values))
    generator = torch.Generator().manual_seed(0)
    theirs = dict(oracle.named_parameters())
    ours = dict(model.named_parameters())
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for key, parameter in theirs.items():
            around = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.normal_(0, 0.2, generator=generator).add_(around)
            ours[key].copy_(parameter)
    return model, oracle
