"""Checkpoints of every family, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from transformers.utils import logging

from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.models.weights import load

from .checkpoints import FAMILY_CONFIGS, Config, load_oracle, make_checkpoint
from .deepseek_checkpoints import THIRD_CONFIGS
from .recurrent_checkpoints import RECURRENT_CONFIGS
from .sparse_models import SPARSE_CONFIGS

logging.disable_progress_bar()
CONFIGS = dict(FAMILY_CONFIGS + THIRD_CONFIGS) | SPARSE_CONFIGS


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and the same weights as transformers and as Strata load them (float32, CPU)."""

    folder: Path
    values: Config
    oracle: PreTrainedModel
    model: CausalLM
    config: ModelConfig


@pytest.fixture(scope="session")
def open_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    configs, opened = CONFIGS | RECURRENT_CONFIGS, {}

    def open_one(name: str) -> Checkpoint:
        if name not in opened:
            folder = make_checkpoint(tmp_path_factory.mktemp(name), configs[name])
            model, config = load(folder)
            opened[name] = Checkpoint(folder, configs[name], load_oracle(folder), model, config)
        return opened[name]

    return open_one


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, open_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """Each of `CONFIGS` in turn. Shared by the tests: do not write to it."""
    return open_checkpoint(request.param)


@pytest.fixture(params=["llama-biases-linear-tied", "mistral-window", "qwen2-window", "qwen3-biases-window"])
def family(request: pytest.FixtureRequest, open_checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """One checkpoint of each family."""
    return open_checkpoint(request.param)
