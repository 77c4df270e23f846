"""From a checkpoint to a model folder as Hugging Face lays it out, for `strata serve` and transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from strata.models.config import ModelConfig
from strata.models.experts import CORRECTION
from strata.models.families import build
from strata.models.save import save
from strata.models.weights import materialize
from strata.train.checkpoints.flat_ranges import FlatRange
from strata.train.checkpoints.reader import Reader
from strata.train.checkpoints.state import MASTER, SELECTION_BIAS


@torch.no_grad()
def export(path: Path, config: ModelConfig, tokenizer: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the masters of the checkpoint `path`, rounded to `dtype`, to the folder `out`; see `save`.

    tokenizer: a folder with its files. Holds the model in `dtype` in host memory, and of the masters what is being
    read. Raises ValueError if the checkpoint is corrupt or of another model than `config`, or if memory does not
    suffice.
    """
    with torch.device("meta"):
        model = build(config)
    with Reader(path) as reader:
        wanted = dict(model.named_parameters())
        for name, parameter in wanted.items():
            reader.check(*_stored(name), tuple(parameter.shape))
        stored_names = {shard.name for shard in reader.index.shards if shard.kind == MASTER}
        if unknown := sorted(stored_names - wanted.keys()):
            raise ValueError(f"checkpoint {path} has {unknown[0]}, which this model has not; it is of another model")
        materialize(model, torch.device("cpu"), dtype)
        for name, parameter in model.named_parameters():
            reader.fill(*_stored(name), _whole(parameter), parameter.view(-1))
    save(model, config, out, tokenizer)


def trained_values(path: Path) -> dict[str, torch.Tensor]:
    """Everything that the checkpoint `path` has masters of, by name, whole, in float32 on the CPU. Raises ValueError if
    it is corrupt.
    """
    with Reader(path) as reader:
        shapes = {shard.name: shard.shape for shard in reader.index.shards if shard.kind == MASTER}
        found = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        for name, value in found.items():
            reader.fill(MASTER, name, _whole(value), value.view(-1))
    return found


def _whole(tensor: torch.Tensor) -> FlatRange:
    return FlatRange(tuple((0, size) for size in tensor.shape), 0, tensor.numel())


def _stored(name: str) -> tuple[str, str]:
    """Kind and name in a checkpoint of what the model calls `name`: biases that no optimizer moves have their own."""
    router, _, last = name.rpartition(".")
    return (SELECTION_BIAS, router) if last == CORRECTION else (MASTER, name)
