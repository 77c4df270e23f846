"""Latent attention in config.json and in what follows from it: published fields, what is refused, work and layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.rotary import YarnRope
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.parallel.layout import Layout
from strata.train.predict.flops import active_elements
from strata.train.predict.layer_costs import layer_costs

from .checkpoints import FAMILY_CONFIGS, make_checkpoint

CONFIGS = dict(FAMILY_CONFIGS)
# What https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json says besides (2024-05).
BESIDES = {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "seq_aux": True,
    "attention_bias": False,
    "pretraining_tp": 1,
}


def test_the_published_fields_are_read() -> None:
    config = config_from_dict(SHAPES["V2-Lite"] | BESIDES)
    assert config == config_from_dict(SHAPES["V2-Lite"])
    assert isinstance(config.rope, YarnRope)
    assert config.rope.attention_factor == 1.0
    # 0.1 * 0.707 * ln(40) + 1, squared.
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.2608038**2, rel=1e-6)
    assert config.longest == 163840


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("deepseek-v2-lite-yarn", {"num_key_value_heads": 1}, "num_key_value_heads = 1 .* each of the num_att"),
        ("deepseek-v2-lite-yarn", {"qk_rope_head_dim": 5}, "qk_rope_head_dim = 5 .* an even number"),
        ("deepseek-v2-lite-yarn", {"head_dim": 16}, "head_dim = 16 .* accepted is 6"),
        ("deepseek-v2-lite-yarn", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' .* one of 'greedy'"),
        ("deepseek-v2-lite-yarn", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek-v2-lite-yarn", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek-v2-lite-yarn", {"rope_interleave": False}, "unknown field rope_interleave"),
        ("deepseek-v2-groups-biases-wide-values", {"n_group": 5}, "n_group = 5 .* a divisor of n_routed_experts = 12"),
        ("deepseek-v3-groups-yarn", {"topk_group": 5}, "topk_group = 5 .* at most n_group = 4"),
        ("deepseek-v3-groups-yarn", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*hqq"),
        ("deepseek-v3-groups-yarn", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'default' or"),
    ],
)
def test_what_is_not_there_is_named(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_dict(CONFIGS[name] | change)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    for name, passes in (("deepseek-v3-groups-yarn", True), ("deepseek-v2-lite-yarn", False)):
        folder = make_checkpoint(tmp_path / name, CONFIGS[name])
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
        if passes:
            load(folder)
        else:
            with pytest.raises(ValueError, match=re.escape("model.layers.3.eh_proj.weight")):
                load(folder)


def test_work_follows_from_the_matrices_that_a_token_meets() -> None:
    config = config_from_dict(CONFIGS["deepseek-v3-groups-yarn"])
    assert config.experts is not None
    with torch.device("meta"):
        layers = build(config).model.layers
    for number, layer in enumerate(layers):
        wanted = sum(p.numel() for name, p in layer.named_parameters() if p.dim() > 1 and "mlp.experts" not in name)
        routed = sum(p[0].numel() for name, p in layer.named_parameters() if "mlp.experts" in name)
        assert active_elements(config, number) == wanted + config.experts.per_token * routed


def test_training_counts_what_documents_call_for() -> None:
    """Of a dense layer: its matrices, keys and values expanded, and scores and sums of the pairs that are seen."""
    config, length = config_from_dict(CONFIGS["deepseek-v2-lite-yarn"]), 200
    layer = layer_costs(config, length)[0]
    dense = 2 * active_elements(config, 0) * length + 2 * 7 * (16 + 14) * (length * (length + 1) // 2)
    assert layer.forward.dense * length + layer.forward.attention == dense
    assert layer.backward.dense * length + layer.backward.attention == 2 * dense


def test_layouts_that_divide_weights_are_refused() -> None:
    config = config_from_dict(CONFIGS["deepseek-v2-lite-yarn"])
    for layout, ranks in ((Layout(tp=7), 7), (Layout(cp=2), 2)):
        with pytest.raises(ValueError, match="would divide the latent attention of DeepseekV2ForCausalLM"):
            layout.check(config, ranks)
    for layout, ranks in ((Layout(pp=2), 2), (Layout(shard=2, zero=3), 2), (Layout(dp=2, shard=2, zero=2), 4)):
        layout.check(config, ranks)
