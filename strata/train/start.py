"""What a run begins with: tokenizer, shape and weights, checked against its data before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strata.comm.launch import World
from strata.models.config import ModelConfig, config_from_dict, read_config
from strata.text.tokenizer import Tokenizer
from strata.train.adapters.frozen import check_weights
from strata.train.checkpoints.folder import checkpoints
from strata.train.config import TrainConfig, check_trainable
from strata.train.data.loader import ORDER, Loader, OnceLoader, check_capacity, check_data
from strata.train.data.mixture import DatasetReader, Mixture
from strata.train.data.shards import TokenDataset
from strata.train.layout import chosen_layout


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


@dataclass(frozen=True)
class RunData:
    """What a run trains on, and what it is validated by, which is none of it."""

    training: list[TokenDataset]
    validation: list[TokenDataset]

    @property
    def every(self) -> list[TokenDataset]:
        return self.training + self.validation

    @property
    def reader(self) -> DatasetReader:
        """Of all, with those that are trained on first."""
        return DatasetReader(self.every)


def open_data(config: TrainConfig, warn: Callable[[str], None], *, checksums: bool = True) -> RunData:
    """The sources of a run and what [validation] asks for, every shard checked, by its checksums if asked. warn: is
    called with shards that are left out. Raises ValueError for others that are damaged, and for validation data that is
    trained on.
    """

    def opened(folder: str) -> TokenDataset:
        dataset = TokenDataset(folder, skip_corrupt=config.data.skip_corrupt, checksums=checksums)
        if dataset.skipped:
            warn(f"{dataset.folder}: training goes without damaged shards: {', '.join(dataset.skipped)}")
        return dataset

    training, validation = [opened(one.folder) for one in config.data.sources], config.validation
    if validation is None:
        return RunData(training, [])
    if validation.share is not None:
        kept, held_out = zip(*(one.divided(validation.share) for one in training), strict=True)
        return RunData([*kept], [*held_out])
    assert validation.folder is not None
    apart = opened(validation.folder)
    if any(one.fingerprint == apart.fingerprint for one in training):
        raise ValueError(
            f"validation.folder = {validation.folder!r} holds what the run trains on; give other data, or hold a part "
            "of it out with validation.share"
        )
    return RunData(training, [apart])


def training_loader(config: TrainConfig, data: RunData, *, rank: int, ranks: int) -> Loader:
    """Of this rank of those that see documents of their own. Raises ValueError if the data does not go with them."""
    given = config.data
    return Loader(
        Mixture(data.training, [one.weight for one in given.sources], config.run.seed),
        given.tokens_per_pack,
        given.packs_per_step,
        given.window,
        rank=rank,
        ranks=ranks,
        by_epoch=config.run.epochs is not None,
    )


def validation_loader(config: TrainConfig, data: RunData, *, rank: int, ranks: int) -> OnceLoader | None:
    """The same for what the run is validated by, in the same packs; None if by nothing."""
    return once_loader(config, data, len(data.training), rank=rank, ranks=ranks) if data.validation else None


def once_loader(config: TrainConfig, data: RunData, first: int, *, rank: int, ranks: int) -> OnceLoader:
    """The same for each sample of all datasets from the number `first` on, once."""
    given = config.data
    return OnceLoader(
        data.reader,
        range(first, len(data.every)),
        given.tokens_per_pack,
        given.packs_per_step,
        given.window,
        rank=rank,
        ranks=ranks,
    )


def lasting(config: TrainConfig, loader: Loader) -> TrainConfig:
    """The run with its length in steps. Raises ValueError if its schedule is longer."""
    epochs = config.run.epochs
    if epochs is None:
        return config
    steps = loader.steps_of(epochs)
    try:
        return replace(config, run=replace(config.run, steps=steps, epochs=None))
    except ValueError as error:
        raise ValueError(f"{error}, which is what run.epochs = {epochs:g} come to") from None


def starting_point(config: TrainConfig, datasets: Sequence[TokenDataset]) -> Start:
    """datasets: all of the run. Raises ValueError where start, model and data do not go together."""
    kind = "preference" if config.dpo else datasets[0].index.kind
    if kind == "preference" and not config.dpo:
        raise ValueError("the data holds preferences: add a [dpo] table, or use chats")
    folder = config.start.folder
    with Tokenizer.load(folder) as tokenizer:
        found = read_config(folder) if config.model is None else fresh_config(config.model, tokenizer)
        check_trainable(found)
        check_data(datasets, kind, found, tokenizer)
    if config.model is None:
        lora = config.lora
        quantization = None if lora is None else lora.quantization
        check_weights(folder, found, trains_adapters=lora is not None, quantization=quantization)
    return Start(found, None if config.model is not None else folder, folder)


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


def recipe_of(config: TrainConfig, datasets: Sequence[TokenDataset], device: str) -> dict[str, Any]:
    """What decides the numbers of a run, which a checkpoint keeps and a resumed run must share.

    By section, as JSON gives it back. Where ranks and state lie, the length of a run and its intervals are no part
    of it: those may change when a run is resumed.

    datasets: that are trained on. device: "cpu" or "cuda", which round differently.
    """
    values = asdict(config)
    del values["optimizer"]["offload"]
    for source in values["data"]["sources"]:
        del source["folder"]  # its fingerprint says what is in it
    recipe = {
        "run": {"seed": config.run.seed, "device": device, "precision": config.run.precision},
        **{name: values[name] or {} for name in ("start", "model", "data", "optimizer", "balance", "lora", "dpo")},
        "validation": {"share": None if config.validation is None else config.validation.share},
        "order": {"version": ORDER} | ({} if config.run.epochs is None else {"by_epoch": True}),
        "fingerprints": dict(enumerate(one.fingerprint for one in datasets)),
    }
    read: dict[str, Any] = json.loads(json.dumps(recipe))
    return read


def check_run(config: TrainConfig, ranks: int, *, resume: bool) -> None:
    """Raise ValueError, as `ranks` ranks would, for what they would not begin with: folder, data, start, layout.

    What depends on their devices is left to them, and so are the checksums of the data, which take long.
    """
    resumed(Path(config.run.out), wanted=resume)
    found = open_data(config, _ignored, checksums=False)
    start = starting_point(config, found.every)
    ways = ranks
    if config.parallel is not None:  # otherwise chosen by the memory of the devices
        layout = chosen_layout(config, start.config, World(0, 0, ranks, torch.device("cpu"), None), _ignored)
        ways = layout.dp * layout.shard
    lasting(config, training_loader(config, found, rank=0, ranks=ways))
    check_capacity(found.validation, config.data.tokens_per_pack)


def _ignored(_: str) -> None:
    """The ranks report it."""
