"""Models that are served alone are refused wherever a training would begin or is planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.files.toml_tables import read_table
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.parallel.layout import Layout
from strata.plan.training.task import TrainingTask
from strata.train.config import TrainConfig
from strata.train.phases import NO_PHASES
from strata.train.stepper import Setting, make_stepper
from tests.models.checkpoints import FAMILY_CONFIGS
from tests.train.conftest import SMALL

CONFIGS = dict(FAMILY_CONFIGS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3-softcap-untied-biases", "final_logit_softcapping = 3.0"),
    ],
)
def test_neither_a_plan_nor_adapters_nor_preferences_train_them(name: str, said: str, tmp_path: Path) -> None:
    model = config_from_dict(CONFIGS[name], "model")
    with pytest.raises(ValueError, match=said):
        TrainingTask(model, device("h200"), 1, 64, 64)
    start: Any = SimpleNamespace(config=model)
    unread: Any = None
    mesh: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))
    table = {name: value for name, value in SMALL.items() if name != "model"}
    table |= {"start": {"model": "folder"}, "data": SMALL["data"] | {"sources": [{"folder": "text"}]}}
    table |= {"run": SMALL["run"] | {"out": str(tmp_path)}}
    for tuned in ({}, {"lora": {"rank": 2, "alpha": 4.0}}, {"dpo": {}}):
        config = read_table(TrainConfig, table | tuned)
        setting = Setting(config, start, Layout(), mesh, unread, tmp_path, NO_PHASES, lambda: None, "none", print)
        with pytest.raises(ValueError, match=said):
            make_stepper(setting)
