"""What a run on tokenized data is: pretraining from text, SFT, LoRA or DPO, by which tables its TOML file has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.train.config import OptimizerConfig, ScheduleConfig
from strata.train.dpo import DpoConfig
from strata.train.lora import LoraConfig
from strata.train.tables import read_table, read_toml


@dataclass(frozen=True)
class TuneRunConfig:
    """out: the folder that receives log, checkpoints and model. Intervals are in steps."""

    out: str
    steps: int
    seed: int = 0
    device: str = "auto"
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class StartConfig:
    """model: the folder that training starts from, or "builtin". With a [model] table only its tokenizer is used."""

    model: str


@dataclass(frozen=True)
class SourceConfig:
    """folder: what `strata data` has written. weight: its share of the tokens, relative to the other sources."""

    folder: str
    weight: float = 1.0


@dataclass(frozen=True)
class TokenDataConfig:
    """A step is `packs_per_step` packs of at most `tokens_per_pack` tokens, over all ranks.

    window: samples that are packed together; larger fills packs better. skip_corrupt: train without damaged shards.
    """

    sources: list[SourceConfig]
    tokens_per_pack: int
    packs_per_step: int = 1
    window: int = 1024
    skip_corrupt: bool = False


@dataclass(frozen=True)
class TuneConfig:
    """A whole run. model: config.json of a fresh model, in part. lora: train adapters alone. dpo: learn preferences."""

    run: TuneRunConfig
    start: StartConfig
    data: TokenDataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    model: dict[str, Any] | None = None
    lora: LoraConfig | None = None
    dpo: DpoConfig | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("run.steps", self.run.steps),
            ("run.log_every", self.run.log_every),
            ("run.checkpoint_every", self.run.checkpoint_every),
            ("run.keep_checkpoints", self.run.keep_checkpoints),
            ("data.tokens_per_pack", self.data.tokens_per_pack),
            ("data.packs_per_step", self.data.packs_per_step),
            ("data.window", self.data.window),
            ("optimizer.learning_rate", self.optimizer.learning_rate),
            ("optimizer.clip", self.optimizer.clip),
        ):
            if not value > 0:
                raise ValueError(f"{name} = {value} must be positive")
        if not self.data.sources:
            raise ValueError("data.sources is empty; name at least one folder that `strata data` has written")
        if self.schedule.warmup + self.schedule.decay > self.run.steps:
            raise ValueError(f"schedule.warmup + schedule.decay exceed run.steps = {self.run.steps}")
        if self.model is not None and (self.lora is not None or self.dpo is not None):
            raise ValueError("[lora] and [dpo] start from a trained model: remove [model], or those")


def read_tune_config(path: Path) -> TuneConfig:
    """The run that a TOML file describes. Raises ValueError for a missing file, an unknown key or a wrong value."""
    return read_table(TuneConfig, read_toml(path), str(path))
