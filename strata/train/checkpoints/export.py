"""From a checkpoint to a model folder as Hugging Face lays it out, for `strata serve` and transformers."""

from __future__ import annotations

import math
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
            whole = FlatRange(tuple((0, size) for size in parameter.shape), 0, math.prod(parameter.shape))
            reader.fill(*_stored(name), whole, parameter.view(-1))
    save(model, config, out, tokenizer)


def _stored(name: str) -> tuple[str, str]:
    """Kind and name in a checkpoint of what the model calls `name`: biases that no optimizer moves have their own."""
    router, _, last = name.rpartition(".")
    return (SELECTION_BIAS, router) if last == CORRECTION else (MASTER, name)
