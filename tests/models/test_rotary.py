"""How long a sequence may be, angles beyond max_position_embeddings, and families with latents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Qwen2Config, Qwen3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.rotary import YarnRope, rope_table
from strata.models.shapes import SHAPES
from strata.models.weights import load
from strata.train.predict.flops import active_elements
from strata.train.predict.layer_costs import layer_costs

from .checkpoints import FAMILY_CONFIGS, make_checkpoint

# As in the model cards of Qwen2.5 and Qwen3; config.json's max_position_embeddings is left as it is.
QWEN_RECIPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


def values(family: str, length: int, scaling: dict[str, Any] | None) -> dict[str, Any]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 1000000.0}
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return {**named, **SIZES, **heads, "max_position_embeddings": length, "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("length", "scaling", "longest"),
    [
        (32768, QWEN_RECIPE, 131072),  # Qwen2.5
        (40960, QWEN_RECIPE, 131072),  # Qwen3
        (131072, QWEN_RECIPE, 131072),  # raised by whoever applied the recipe
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"rope_type": "yarn", "factor": 2.0}, 65536),
        (163840, {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),  # as in Vicuna 16k
        (4096, {"rope_type": "linear", "factor": 0.5}, 4096),
        (4096, {"rope_type": "dynamic", "factor": 4.0}, 4096),  # grows only if asked, since that changes all angles
        (131072, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}, 131072),
        (4096, None, 4096),
    ],
)  # fmt: skip
def test_the_longest_sequence_is_what_the_scaling_is_made_for(
    length: int, scaling: dict[str, Any] | None, longest: int
) -> None:
    config = config_from_dict(values("Qwen2", length, scaling))
    assert config.longest == longest
    assert config_from_dict(config.to_dict()).longest == longest
    with torch.device("meta"):
        assert build(config).model.rotary.table.shape == (longest, 128)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "theirs", "rotary"),
    [("Qwen2", Qwen2Config, Qwen2RotaryEmbedding), ("Qwen3", Qwen3Config, Qwen3RotaryEmbedding)],
)
def test_the_angles_of_qwens_recipe_equal_transformers(family: str, theirs: Any, rotary: Any) -> None:
    asked = values(family, 32768, QWEN_RECIPE)
    config = config_from_dict(asked)
    oracle = rotary(theirs(**{name: value for name, value in asked.items() if name != "architectures"}))
    assert oracle.inv_freq.tolist() == config.rope.inverse_frequencies(128, 32768, 131072).tolist()
    places = torch.tensor([0, 1, 17, 4095, 32767, 32768, 65536, 100_000, 131_071])
    cos, sin = oracle(torch.ones(1), places[None])
    table = rope_table(config.rope, 128, config.max_length, config.longest)[places]
    # Angles of 100,000 radians are exact to 0.008 in float32, but both multiply the same numbers.
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0, atol=1e-5)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0, atol=1e-5)


PHI = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 3.0 * i for i in range(8)],
}


@pytest.mark.parametrize("length", [64, 65, 200])
@pytest.mark.parametrize("own", [{}, {"attention_factor": 1.3}, {"factor": 4.0}])
def test_longrope_takes_the_factors_of_the_longest_sequence_from_the_start(own: dict[str, Any], length: int) -> None:
    """The short ones up to the original length; equal to transformers for a sequence of that length."""
    sizes = SIZES | {"num_attention_heads": 2, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    asked = sizes | {"partial_rotary_factor": 1.0, "rope_parameters": PHI | own, "pad_token_id": 0}
    config = config_from_dict(asked | {"architectures": ["Phi3ForCausalLM"]})
    table = rope_table(config.rope, config.rotary_dim, config.max_length, length)
    theirs = Phi3RotaryEmbedding(Phi3Config(**asked))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    assert torch.allclose(table, torch.cat((cos[0, :, :8], sin[0, :, :8]), -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0]}, "short_factor and long_factor with 8 numbers each"),
        ({"long_factor": [0.0] * 8}, "long_factor = .* a list of numbers greater than 0"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type 'default' or 'longrope' or 'su'"),
        (
            {"partial_rotary_factor": 0.1},
            "partial_rotary_factor = 0.1 .* a part of head_dim = 16 that is an even",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    ],
)
def test_rotations_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    asked = SIZES | {"num_attention_heads": 2, "rope_parameters": PHI | changes, "architectures": ["Phi3ForCausalLM"]}
    with pytest.raises(ValueError, match=message):
        config_from_dict(asked)


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
    assert config.rope.attention_scaling == 1.0
    # 0.1 * 0.707 * ln(40) + 1, squared.
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.2608038**2, rel=1e-6)
    assert config.longest == 163840


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
