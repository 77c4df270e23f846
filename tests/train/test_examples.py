"""The shipped recipes are what their comments say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from strata.models.config import config_from_dict
from strata.models.families import build

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "billions", "head_dim"), [("1b", 1.498, 64), ("8b", 8.030, 128)])
def test_the_large_shapes(name: str, billions: float, head_dim: int) -> None:
    """Llama 3's, whose vocabulary has 128,256 tokens; two sequences of the longest kind fill a pack."""
    recipe = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    config = config_from_dict(recipe["model"] | {"vocab_size": 128_256}, "model")
    with torch.device("meta"):
        model = build(config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert config.head_dim == head_dim
    assert recipe["data"]["tokens_per_pack"] == 2 * config.max_length
    ranks = recipe.get("parallel", {}).get("shard", 1)
    assert recipe["data"]["packs_per_step"] == ranks
