"""Checkpoints: the model as Hugging Face lays it out, and beside it what a resumed run needs."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.weights import load

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Position:
    """How far a run is. step: steps done. document: the first of the mixture not yet trained on. tokens: trained on."""

    step: int = 0
    document: int = 0
    tokens: int = 0


class HasState(Protocol):
    """An optimizer: float32 masters and moments by name, the same names on every device."""

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None: ...


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def save_checkpoint(
    folder: Path,
    model: CausalLM,
    config: ModelConfig,
    tokenizer: Path,
    optimizer: HasState,
    position: Position,
    recipe: dict[str, Any],
) -> Path:
    """Write a checkpoint into `folder`; it appears there whole or not at all.

    tokenizer: the folder with its files. recipe: what a resumed run must share (see `load_checkpoint`). The numbers of
    a step follow from model, optimizer and position: documents are a function of seed and index, and nothing else is
    random.
    """
    target = folder / f"step-{position.step:08}"
    part = folder / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    save(model, config, part, tokenizer)
    save_file({name: tensor.cpu() for name, tensor in optimizer.state().items()}, part / "optimizer.safetensors")
    _write_synced(part / "state.json", json.dumps({"position": asdict(position), "recipe": recipe}, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return target


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the `keep` latest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def load_checkpoint(path: Path, model: CausalLM, optimizer: HasState, recipe: dict[str, Any]) -> Position:
    """Put a checkpoint into `model` and `optimizer`. Raises ValueError if it is corrupt or of another recipe."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        position = Position(**state["position"])
        saved = state["recipe"]
        tensors = load_file(path / "optimizer.safetensors")
    except Exception as error:  # safetensors raises its own bare errors
        raise ValueError(f"checkpoint {path} is corrupt: {error}; remove it to resume from the one before") from None
    for section in recipe:
        for key in recipe[section].keys() | saved.get(section, {}).keys():
            was, now = saved.get(section, {}).get(key), recipe[section].get(key)
            if was != now:
                raise ValueError(
                    f"cannot resume {path}: {section}.{key} was {was!r} and is now {now!r}; "
                    f"restore it, or start a new run in another folder"
                )
    dtype = next(model.parameters()).dtype
    stored, _ = load(path, "cpu", dtype)
    with torch.no_grad():
        for name, parameter in stored.named_parameters():
            model.get_parameter(name).copy_(parameter)
    optimizer.load_state(tensors, position.step)
    return position


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
