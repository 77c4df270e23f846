"""A small run that every test of the trainer can afford, its data and its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from examples import toy_data
from strata.files.toml_tables import read_table
from strata.models.folder import BUILTIN_FOLDER
from strata.train.config import TrainConfig
from strata.train.data.tokenize import tokenize
from strata.train.tasks.exercises import write_exercises
from strata.train.tasks.mixture import document
from strata.train.tasks.vocabulary import make_tokenizer, write_tokenizer
from strata.train.trainer import Trainer
from tests.train.samples import write_lines
from tests.train.tiny_run import LLAMA, log_of, repeatable

# Its [start] and [data] name folders, which fixtures make.
SMALL: dict[str, Any] = {
    "run": {"out": "", "steps": 6, "seed": 3, "device": "cpu", "log_every": 1, "checkpoint_every": 3},
    "model": LLAMA | {"max_position_embeddings": 1024},
    "data": {"tokens_per_pack": 600, "packs_per_step": 2, "window": 64},
    "optimizer": {"learning_rate": 5e-3},
    "schedule": {"warmup": 2, "decay": 2},
}

# A fresh model of the toy text, with the built-in tokenizer.
FRESH: dict[str, Any] = {
    "start": {"model": None, "tokenizer": "builtin"},
    "model": LLAMA
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128},
    "optimizer": {"learning_rate": 1e-2},
}

Small = Callable[..., TrainConfig]
Tune = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def made_tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer((document(3, i) for i in range(200)), 600)


@pytest.fixture(scope="session")
def tokenizer_folder(made_tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made_tokenizer, folder, 1024)
    return folder


@pytest.fixture(scope="session")
def exercises(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 exercises, of 20,000 tokens or so."""
    folder = tmp_path_factory.mktemp("exercises")
    write_exercises(folder, 300, tokenizer_folder=tokenizer_folder, seed=3)
    return folder


@pytest.fixture
def small_table(exercises: Path, tokenizer_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The small config as its TOML file would hold it."""
    values = copy.deepcopy(SMALL)
    values["run"]["out"] = str(tmp_path / "run")
    values["start"] = {"tokenizer": str(tokenizer_folder)}
    values["data"]["sources"] = [{"folder": str(exercises)}]
    return values


@pytest.fixture
def small(small_table: dict[str, Any]) -> Small:
    """The small config, with values replaced by section: small(run={"steps": 30})."""
    return lambda **changes: config_of(small_table, changes)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of the toy data of the examples, tokenized by the built-in tokenizer: style, short, and text."""
    folder, builtin = tmp_path_factory.mktemp("toy"), BUILTIN_FOLDER
    for name, records in (("style", toy_data.style(60)), ("short", toy_data.short(40))):
        write_lines(folder / f"{name}.jsonl", records)
        tokenize([folder / f"{name}.jsonl"], builtin, folder / name)
    (folder / "text.txt").write_text("A line of text to learn by heart.\n" * 400)
    tokenize([folder / "text.txt"], builtin, folder / "text", longest=100)
    return folder


@pytest.fixture
def tune(toy: Path, tmp_path: Path) -> Tune:
    """A few small steps of the built-in model on one kind of the toy data; values replaced by section."""

    def made(source: str, **changes: dict[str, Any]) -> TrainConfig:
        values = {
            "run": {"out": str(tmp_path / "run"), "steps": 4, "device": "cpu", "log_every": 1, "checkpoint_every": 2},
            "start": {"model": "builtin"},
            "data": {"sources": [{"folder": str(toy / source)}], "tokens_per_pack": 600},
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"warmup": 1, "decay": 1},
        }
        return config_of(values, changes)

    return made


def config_of(table: dict[str, Any], changes: dict[str, dict[str, Any]]) -> TrainConfig:
    """The config of a table with values replaced by section. A value of None takes the key away."""
    values = copy.deepcopy(table)
    for section, changed in changes.items():
        replaced = values.get(section, {}) | changed
        values[section] = {key: value for key, value in replaced.items() if value is not None}
    return read_table(TrainConfig, values)


def log(folder: Path) -> list[dict[str, Any]]:
    """The log of a run without what is measured."""
    return repeatable(log_of(folder))


class CutOff(Exception):
    """The end of a run at any place."""


def cut_off(run: Trainer, step: int) -> None:
    """Train until the line of a step is in the log, with the checkpoint before it on the disk, and no further."""

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == step:
            run.checkpoints.finish()
            raise CutOff

    with pytest.raises(CutOff):
        run.train(stop)
