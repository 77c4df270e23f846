"""From a checkpoint to a model folder as Hugging Face lays it out, for `strata serve` and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.save import save
from strata.train.checkpoints.flat_ranges import FlatRange
from strata.train.checkpoints.reader import Reader
from strata.train.checkpoints.state import MASTER, state_of


@torch.no_grad()
def export(path: Path, config: ModelConfig, tokenizer: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the masters of the checkpoint `path`, rounded to `dtype`, to the folder `out`; see `save`.

    tokenizer: a folder with its files. Holds a shard of the new files in host memory, and of the masters what is being
    read. Raises ValueError if the checkpoint is corrupt or of another model than `config`.
    """
    with torch.device("meta"):
        model = build(config)
    with Reader(path) as reader:
        wanted = dict(model.to(dtype).named_parameters())
        for name, parameter in wanted.items():
            reader.check(*state_of(name), tuple(parameter.shape))
        stored_names = {shard.name for shard in reader.index.shards if shard.kind == MASTER}
        if unknown := sorted(stored_names - wanted.keys()):
            raise ValueError(f"checkpoint {path} has {unknown[0]}, which this model has not; it is of another model")

        def values() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in wanted.items():
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                reader.fill(*state_of(name), FlatRange.of_whole(value.shape), value.view(-1))
                yield name, value

        save(model, config, out, tokenizer, values=values())


def trained_values(path: Path) -> dict[str, Tensor]:
    """Everything that the checkpoint `path` has masters of, by name, whole, in float32 on the CPU. Raises ValueError if
    it is corrupt.
    """
    with Reader(path) as reader:
        shapes = {shard.name: shard.shape for shard in reader.index.shards if shard.kind == MASTER}
        found = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        for name, value in found.items():
            reader.fill(MASTER, name, FlatRange.of_whole(value.shape), value.view(-1))
    return found
