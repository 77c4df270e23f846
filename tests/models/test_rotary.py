"""How long a sequence may be by config.json, and the angles of positions beyond max_position_embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.rotary import rope_table

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
