"""Runs of families with recurrent layers, in one process on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strata.comm.launch import World
from strata.train.config import read_train_config
from strata.train.trainer import Trainer
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.train.tiny_run import Files, log_of, write_files, write_toml

ALONE = World(0, 0, 1, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid-experts", "qwen3-next"])
def test_losses_fall(name: str, files: Files, tmp_path: Path) -> None:
    table = files.table(tmp_path / "out", run={"steps": 8, "checkpoint_every": 8})
    table["model"] = {key: value for key, value in RECURRENT_CONFIGS[name].items() if key != "vocab_size"}
    Trainer(read_train_config(write_toml(tmp_path / "run.toml", table)), ALONE).train()
    losses = [line["loss"] for line in log_of(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.2
    assert losses == sorted(losses, reverse=True)
