"""The shipped recipes are what their comments say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from strata.cli.train_estimate import estimate_text
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.train.config import read_train_config

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(("name", "billions", "head_dim"), [("1b", 1.498, 64), ("8b", 8.030, 128)])
def test_the_large_shapes(name: str, billions: float, head_dim: int) -> None:
    """Llama 3's, whose vocabulary has 128,256 tokens; two sequences of the longest kind fill a pack."""
    recipe = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    config = config_from_dict(recipe["model"], "model")
    with torch.device("meta"):
        model = build(config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert config.head_dim == head_dim
    assert recipe["data"]["tokens_per_pack"] == 2 * config.max_length
    ranks = recipe.get("parallel", {}).get("shard", 1)
    assert recipe["data"]["packs_per_step"] == ranks


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_estimate_needs_no_file_but_the_recipe(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = read_train_config(path)
    lines = estimate_text(run, "h200", run.parallel.ranks if run.parallel else 1).splitlines()
    assert sum(line.startswith("* recompute") for line in lines) == 1


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_commands_of_a_recipe_are_as_the_command_line_has_them(path: Path) -> None:
    commands = [line[1:].split() for line in path.read_text().splitlines() if line.startswith("#     strata")]
    assert ["strata", "train", f"examples/{path.name}"] in [words[:3] for words in commands]
    assert all(words[2] == "--model" for words in commands if words[1] == "chat")
