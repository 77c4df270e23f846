"""Checkpoints: the model as Hugging Face lays it out, and beside it what a resumed run needs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
_OPTIMIZER = "optimizer.safetensors"


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


def checkpoints_of(run: Path, *, resume: bool) -> list[Path]:
    """Those of a run's folder. Raises ValueError if there are some and they are not to be resumed."""
    existing = checkpoints(run / "checkpoints")
    if existing and not resume:
        raise ValueError(f"{run} holds a run (step {existing[-1].name[5:]}); resume it or choose another out")
    return existing


@contextmanager
def new_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to fill, which appears in `folder` whole at the end of the block, or not at all.

    state: plain values, kept as JSON: `position` and `recipe` (see `read_state`).
    """
    target = folder / f"step-{step:08}"
    part = folder / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    (part / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    for file in part.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def save_checkpoint(
    folder: Path,
    model: CausalLM,
    config: ModelConfig,
    tokenizer: Path,
    optimizer: HasState,
    position: Position,
    recipe: Mapping[str, Any],
) -> None:
    """Write a checkpoint into `folder`; it appears there whole or not at all.

    tokenizer: the folder with its files. recipe: what a resumed run must share (see `check_recipe`). The numbers of a
    step follow from model, optimizer and position: documents are a function of seed and index, and nothing else is
    random.
    """
    with new_checkpoint(folder, position.step, {"position": asdict(position), "recipe": recipe}) as part:
        save(model, config, part, tokenizer)
        save_state(optimizer, part)


def save_state(optimizer: HasState, folder: Path) -> None:
    """Write an optimizer's state into a checkpoint; `read_state` gives it back."""
    save_file({name: tensor.cpu() for name, tensor in optimizer.state().items()}, folder / _OPTIMIZER)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the `keep` latest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError, which names the checkpoint and the remedy, for whatever fails inside."""
    try:
        yield
    except Exception as error:  # safetensors raises its own bare errors
        raise ValueError(f"checkpoint {path} is corrupt: {error}; remove it to resume from the one before") from None


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Position, recipe and the optimizer's state of a checkpoint, within `reading`."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state["position"], state["recipe"], load_file(path / _OPTIMIZER)


def check_recipe(path: Path, saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first difference, if a checkpoint is of another recipe: values by section."""
    for section in recipe:
        for key in recipe[section].keys() | saved.get(section, {}).keys():
            was, now = saved.get(section, {}).get(key), recipe[section].get(key)
            if was != now:
                raise ValueError(
                    f"cannot resume {path}: {section}.{key} was {was!r} and is now {now!r}; "
                    f"restore it, or start a new run in another folder"
                )


def load_checkpoint(path: Path, model: CausalLM, optimizer: HasState, recipe: Mapping[str, Any]) -> Position:
    """Put a checkpoint into `model` and `optimizer`. Raises ValueError if it is corrupt or of another recipe."""
    with reading(path):
        values, saved, tensors = read_state(path)
        position = Position(**values)
    check_recipe(path, saved, recipe)
    dtype = next(model.parameters()).dtype
    stored, _ = load(path, "cpu", dtype)
    with torch.no_grad():
        for name, parameter in stored.named_parameters():
            model.get_parameter(name).copy_(parameter)
    optimizer.load_state(tensors, position.step)
    return position
