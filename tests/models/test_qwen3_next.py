"""Qwen3-Next: the published shape by hand, what checkpoints hold besides, what is refused, sixteen bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.shapes import SHAPES
from strata.models.weights import load

from .batches import packed, random_sequences
from .checkpoints import load_oracle, make_checkpoint
from .recurrent_checkpoints import RECURRENT_CONFIGS
from .test_recurrent import oracle_logits

VALUES = RECURRENT_CONFIGS["qwen3-next"]
# Qwen/Qwen3-Next-80B-A3B-Instruct, as transformers 4.57 wrote it.
# fmt: off
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id":
    151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype":
    "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size":
    151936,
}
# fmt: on


def test_the_published_shape_has_the_parameters_counted_by_hand() -> None:
    config = config_from_dict(PUBLISHED)
    assert config_from_dict(SHAPES["80B-A3B"]) == config
    assert config_from_dict(config.to_dict()) == config
    assert config.attends == (False, False, False, True) * 12
    assert (config.rotary_dim, config.longest, config.dtype) == (64, 262144, torch.bfloat16)
    with torch.device("meta"):
        held = sum(parameter.numel() for parameter in build(config).parameters())
    hidden, keys, values = 2048, 16 * 128, 32 * 128
    # Queries, keys, values and gates; strengths and decays; four taps of each channel; the norm; the end.
    net = hidden * (2 * keys + 2 * values) + hidden * 64 + 4 * (2 * keys + values) + 2 * 32 + 128 + values * hidden
    # Queries with their gates, keys and values, the end, two norms of heads.
    attention = hidden * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * hidden + 2 * 256
    # 512 experts and the shared one, the router's rows, the row of the shared one's gate; two norms of the layer.
    block = 513 * 3 * hidden * 512 + 512 * hidden + hidden + 2 * hidden
    assert held == 36 * net + 12 * attention + 48 * block + hidden + 2 * 151936 * hidden == 79_674_391_296


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", VALUES)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.gate.weight": torch.ones(3)}, file)
    model, _ = load(folder)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    save_file(tensors | {"model.mtp.fc.weight": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=r"does not call for: model\.mtp\.fc\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads = 3 .* divisor of linear_num_value_heads = 4"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim = 5"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "a list of 2 of"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"linear_key_head_dims": 8}, "is linear_key_head_dim meant"),
    ],
)
def test_what_is_not_there_is_named(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_dict(VALUES | fields)


def test_layers_follow_from_the_interval_or_their_types() -> None:
    config = config_from_dict(VALUES | {"num_hidden_layers": 7, "full_attention_interval": 3})
    assert [layer for layer, attends in enumerate(config.attends) if attends] == [2, 5]
    part = config.with_layers([1, 2])
    assert isinstance(part.recurrence, GatedDeltaConfig)
    assert part.recurrence == dataclasses.replace(config.recurrence, layers=(True, False))


@torch.no_grad()
def test_sixteen_bits_lose_no_more_than_in_transformers(tmp_path: Path) -> None:
    # Every token goes to both experts: one that goes to another weighs more than all that is rounded.
    folder = make_checkpoint(tmp_path / "narrow", VALUES | {"moe_intermediate_size": 16, "num_experts": 2})
    sequences = random_sequences(97, (40, 90), seed=5)
    exact = oracle_logits(load_oracle(folder), sequences)
    model, _ = load(folder, dtype="bfloat16")
    ours = model.head(model(packed(sequences))).float() - exact
    theirs = oracle_logits(load_oracle(folder, torch.bfloat16), sequences).float() - exact
    assert ours.square().mean().sqrt() < 1.2 * theirs.square().mean().sqrt()


def test_training_begins_with_decays_of_all_sizes() -> None:
    model = build(config_from_dict(VALUES))
    initialize(model, 0)
    net = model.model.layers[0].linear_attn
    assert torch.allclose(net.A_log.exp(), torch.tensor([4.0, 8.0, 12.0, 16.0]))
    assert torch.equal(net.dt_bias, torch.ones(4))
    assert torch.equal(net.norm.weight, torch.ones(8))
    assert torch.equal(model.model.norm.weight, torch.zeros(24))
