"""A small run that every test of the trainer can afford, and its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from strata.train.config import TrainConfig, train_config_from_dict
from strata.train.tasks.mixture import document
from strata.train.vocabulary import make_tokenizer, write_tokenizer

SMALL: dict[str, Any] = {
    "run": {"out": "", "steps": 6, "seed": 3, "device": "cpu", "log_every": 1, "checkpoint_every": 3},
    "model": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "tokenizer": {"vocab_size": 600, "documents": 200},
    "data": {"tokens_per_batch": 1500, "batches_per_step": 2, "documents_per_shard": 32},
    "optimizer": {"learning_rate": 5e-3},
    "schedule": {"warmup": 2, "decay": 2},
}


@pytest.fixture(scope="session")
def tokenizer() -> tokenizers.Tokenizer:
    return make_tokenizer((document(3, i) for i in range(200)), 600)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(tokenizer, folder, 1024)
    return folder


@pytest.fixture
def small_table() -> dict[str, Any]:
    """The small config as its TOML file would hold it, with run.out still to fill in."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., TrainConfig]:
    """The small config, with values replaced by section: small(run={"steps": 30})."""

    def make(**changes: dict[str, Any]) -> TrainConfig:
        values = copy.deepcopy(SMALL)
        values["run"]["out"] = str(tmp_path / "run")
        for section, changed in changes.items():
            values[section] = values.get(section, {}) | changed
        return train_config_from_dict(values, "test")

    return make
