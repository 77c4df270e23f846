"""What a training run is: a TOML file read strictly into frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.train.tables import read_table, read_toml

# Of the products of the layers on a GPU: "fp8-tensor" and "fp8-row" have a scale for each tensor or for each row.
PRECISIONS = ("bf16", "fp8-tensor", "fp8-row")
# What the backward pass computes again on a GPU: nothing, what costs no products, also the widest product, or whole
# layers; from least time to least memory.
RECOMPUTE = ("none", "operations", "mlp", "layers")


@dataclass(frozen=True)
class RunConfig:
    """out: the folder that receives log, data, checkpoints and model. Intervals are in steps.

    precision: of the products of the layers, one of `PRECISIONS`; a CPU computes in float32 and takes "bf16" alone.
    recompute: on a GPU, one of `RECOMPUTE`, or "auto" for the first that fits ("none" for mixtures of experts).
    deterministic: a resumed run repeats every bit; a GPU then goes without cuDNN's attention.
    """

    out: str
    steps: int
    seed: int = 0
    device: str = "auto"
    precision: str = "bf16"
    recompute: str = "auto"
    deterministic: bool = True
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class TokenizerConfig:
    """A byte-level BPE of `vocab_size` tokens, made from the first `documents` documents of the mixture."""

    vocab_size: int = 4096
    documents: int = 60_000


@dataclass(frozen=True)
class DataConfig:
    """A step is `batches_per_step` packed batches of at most `tokens_per_batch` tokens each.

    workers: processes that write shards of `documents_per_shard` documents ahead of the training loop; 0 writes each
    shard when it is needed.
    """

    tokens_per_batch: int
    batches_per_step: int = 1
    documents_per_shard: int = 16_384
    workers: int = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices except the embedding.

    clip: the largest Euclidean norm of the whole gradient.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up, stable, decay: see `strata.train.schedule`. Lengths are in steps."""

    warmup: int
    decay: int


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out questions per task, answered greedily with at most `max_tokens` tokens."""

    examples: int = 300
    max_tokens: int = 384


@dataclass(frozen=True)
class ExportConfig:
    """Where the finished model goes, with its card, accuracy and log."""

    folder: str


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. `model` holds the fields of a config.json; the tokenizer supplies vocab_size and the special ids."""

    run: RunConfig
    model: dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    evaluate: EvaluateConfig | None = None
    export: ExportConfig | None = None

    def __post_init__(self) -> None:
        run, data, optimizer, schedule = self.run, self.data, self.optimizer, self.schedule
        for name, value in (
            ("run.steps", run.steps),
            ("run.log_every", run.log_every),
            ("run.checkpoint_every", run.checkpoint_every),
            ("run.keep_checkpoints", run.keep_checkpoints),
            ("tokenizer.documents", self.tokenizer.documents),
            ("data.tokens_per_batch", data.tokens_per_batch),
            ("data.batches_per_step", data.batches_per_step),
            ("data.documents_per_shard", data.documents_per_shard),
            ("optimizer.learning_rate", optimizer.learning_rate),
            ("optimizer.eps", optimizer.eps),
            ("optimizer.clip", optimizer.clip),
        ):
            if not value > 0:
                raise ValueError(f"{name} = {value} must be positive")
        for name, value in (
            ("data.workers", data.workers),
            ("optimizer.weight_decay", optimizer.weight_decay),
            ("schedule.warmup", schedule.warmup),
            ("schedule.decay", schedule.decay),
        ):
            if value < 0:
                raise ValueError(f"{name} = {value} must not be negative")
        for name, beta in (("optimizer.beta1", optimizer.beta1), ("optimizer.beta2", optimizer.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} = {beta} must lie in [0, 1)")
        for name, choice, choices in (
            ("run.precision", run.precision, PRECISIONS),
            ("run.recompute", run.recompute, ("auto", *RECOMPUTE)),
        ):
            if choice not in choices:
                raise ValueError(f"{name} = {choice!r} must be one of {', '.join(choices)}")
        if run.checkpoint_every % run.log_every:
            # So that a log line never spans the point where a run may resume.
            raise ValueError(
                f"run.checkpoint_every = {run.checkpoint_every} must be a multiple of run.log_every = {run.log_every}"
            )
        if schedule.warmup + schedule.decay > run.steps:
            raise ValueError(
                f"schedule.warmup + schedule.decay = {schedule.warmup + schedule.decay} exceeds run.steps = {run.steps}"
            )
        if not 512 <= self.tokenizer.vocab_size <= 65_536:
            raise ValueError(f"tokenizer.vocab_size = {self.tokenizer.vocab_size} must lie in 512..65536")


def read_train_config(path: Path) -> TrainConfig:
    """The run that a TOML file describes. Raises ValueError for a missing file, an unknown key or a wrong value."""
    return train_config_from_dict(read_toml(path), str(path))


def train_config_from_dict(values: dict[str, Any], where: str) -> TrainConfig:
    """The same from a parsed document; `where` names it in errors."""
    return read_table(TrainConfig, values, where)
