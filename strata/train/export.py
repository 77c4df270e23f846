"""The finished model as a folder to ship: checkpoint, accuracy table, log, recipe and an honest card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.models.config import read_config
from strata.train.data.loader import Position
from strata.train.score import Score


@dataclass(frozen=True)
class Finished:
    """What a run leaves. model: the folder of the model. log: its JSON lines."""

    model: Path
    log: Path
    position: Position
    device: torch.device


def accuracy_table(scores: Sequence[Score]) -> dict[str, Any]:
    """The scores as accuracy.json holds them."""
    return {one.task: {"correct": one.correct, "total": one.total, "accuracy": one.accuracy} for one in scores}


def model_card(trained: Finished, scores: Sequence[Score]) -> str:
    """MODEL_CARD.md of a finished run."""
    config = read_config(trained.model)
    bytes_written = (trained.model / "model.safetensors").stat().st_size
    table = "\n".join(f"| {one.task} | {one.correct} | {one.total} | {one.accuracy:.1%} |" for one in scores)
    mixed = trained.device.type != "cpu"
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return card.format(
        parameters=bytes_written / 2 / 1e6,
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        length=config.longest,
        steps=trained.position.step,
        tokens=trained.position.tokens,
        precision="bfloat16 with float32 master weights" if mixed else "float32, rounded to bfloat16",
        table=table,
    )


def export(trained: Finished, target: Path, scores: Sequence[Score], recipe: dict[str, Any]) -> None:
    """Put the model with card, accuracy, recipe (the config as JSON values) and log into `target`, replacing files."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(trained.model.iterdir()):
        part = target / f".{file.name}.part"
        shutil.copyfile(file, part)
        os.replace(part, target / file.name)
    shutil.copyfile(trained.log, target / "training.jsonl")
    (target / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    (target / "accuracy.json").write_text(json.dumps(accuracy_table(scores), indent=2) + "\n", encoding="utf-8")
    (target / "MODEL_CARD.md").write_text(model_card(trained, scores), encoding="utf-8")
