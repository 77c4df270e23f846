"""What a run begins with: tokenizer, shape and weights, checked against its data before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.models.folder import existing_folder
from strata.text.tokenizer import Tokenizer
from strata.train.adapters.frozen import check_weights
from strata.train.checkpoints.folder import checkpoints
from strata.train.config import DataConfig, StartConfig, TrainConfig
from strata.train.data.loader import check_data
from strata.train.data.shards import TokenDataset


@dataclass(frozen=True)
class Start:
    """config: of the model. weights: the folder that has them; None for a fresh model. tokenizer: its folder."""

    config: ModelConfig
    weights: Path | None
    tokenizer: Path


def resumed(folder: Path, *, wanted: bool) -> bool:
    """Whether the run in a folder goes on from a checkpoint. Raises ValueError if there is one that is not wanted."""
    existing = checkpoints(folder / "checkpoints")
    if existing and not wanted:
        raise ValueError(
            f"{folder} holds a run ({existing[-1].name}); go on with --resume, or choose another folder with --run.out"
        )
    return bool(existing)


def open_data(config: DataConfig, warn: Callable[[str], None], *, checksums: bool = True) -> list[TokenDataset]:
    """The sources of a run, every shard checked, by its checksums if asked. warn: is called with shards that are left
    out. Raises ValueError for others that are damaged.
    """
    datasets = [
        TokenDataset(one.folder, skip_corrupt=config.skip_corrupt, checksums=checksums) for one in config.sources
    ]
    for dataset in datasets:
        if dataset.skipped:
            warn(f"{dataset.folder}: training goes without damaged shards: {', '.join(dataset.skipped)}")
    return datasets


def starting_point(config: TrainConfig, datasets: Sequence[TokenDataset]) -> Start:
    """Raises ValueError where start, model and data do not go together."""
    kind = "preference" if config.dpo else datasets[0].index.kind
    if kind == "preference" and not config.dpo:
        raise ValueError("the data holds preferences: add a [dpo] table, or use chats")
    folder = start_folder(config.start)
    with Tokenizer.load(folder) as tokenizer:
        found = read_config(folder) if config.model is None else fresh_config(config.model, tokenizer)
        check_data(datasets, kind, found, tokenizer)
    if config.model is None:
        lora = config.lora
        quantization = None if lora is None else lora.quantization
        check_weights(folder, found, trains_adapters=lora is not None, quantization=quantization)
    return Start(found, None if config.model is not None else folder, folder)


def start_folder(start: StartConfig) -> Path:
    """The folder of a run's model, or of the tokenizer of a fresh one. Raises ValueError, naming the key, if there is
    none.
    """
    if start.model is not None:
        return existing_folder(start.model, "start.model")
    assert start.tokenizer is not None
    return existing_folder(start.tokenizer, "start.tokenizer")


def fresh_config(fields: dict[str, object], tokenizer: Tokenizer) -> ModelConfig:
    """The config of a fresh model: what the run says, and what follows from the tokenizer.

    A vocab_size above the tokenizer's makes a model with spare rows. Raises ValueError for one below.
    """
    eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    derived = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": tokenizer.pad_id}
    if taken := sorted(fields.keys() & derived.keys()):
        raise ValueError(f"model.{taken[0]} follows from the tokenizer; remove it from the config")
    config = config_from_dict({"vocab_size": tokenizer.vocab_size} | fields | derived, "model")
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size = {config.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; remove it"
        )
    return config
