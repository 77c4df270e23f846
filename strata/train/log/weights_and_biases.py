"""The log in Weights & Biases: https://wandb.ai."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from strata.train.log.config import LogConfig

_ID = "wandb-id.txt"


class WeightsAndBiases:
    """One run there for each run here, however often it is resumed. The package finds its key; it is not read here."""

    def __init__(self, folder: Path, config: LogConfig, run_config: Mapping[str, Any]) -> None:
        """run_config: what the run was started with, shown beside its curves."""
        known = folder / _ID
        identity = known.read_text(encoding="utf-8").strip() if known.exists() else wandb.util.generate_id()
        self._run = wandb.init(
            project=config.wandb_project,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(run_config),
            mode="offline" if config.wandb_offline else "online",
        )
        known.write_text(identity + "\n", encoding="utf-8")
        # A resumed run repeats steps, which the package's own count of calls would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
