"""What a training run is: a TOML file read strictly into frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.files.toml_tables import WrongTable, line_of, read_table, read_toml, replaced
from strata.models.config import ModelConfig
from strata.models.folder import existing_folder
from strata.parallel.layout import Layout
from strata.train.adapters.lora import LoraConfig
from strata.train.checks import one_of, positive
from strata.train.dpo import DpoConfig
from strata.train.faults.config import FaultsConfig
from strata.train.log.config import LogConfig
from strata.train.optimizer.config import OptimizerConfig

# How experts are kept equally busy: by the balancing loss, by a bias on the choice, or not at all.
BALANCE = ("loss", "bias", "none")
# Of the products of the layers on a GPU: "fp8-tensor" and "fp8-row" have a scale for each tensor or for each row.
PRECISIONS = ("bf16", "fp8-tensor", "fp8-row")
# What the backward pass computes again on a GPU: nothing, what costs no products, also the widest product, or whole
# layers; from least time to least memory. Modules that are no graph take "mlp" for all of the MLP, and no "operations".
RECOMPUTE = ("none", "operations", "mlp", "layers")
RECOMPUTE_OF_MODULES = ("none", "mlp", "layers")
# How the learning rate goes on after its warm-up, by the names of Hugging Face. The first alone has a decay.
SCHEDULES = ("warmup_stable_decay", "cosine", "linear", "constant")
# Of a section: what, said on the command line, replaces what of the file, since a run has one of both.
_EITHER = (
    ("run", "steps", "epochs"),
    ("run", "epochs", "steps"),
    ("validation", "folder", "share"),
    ("validation", "share", "folder"),
    ("schedule", "name", "decay"),
)


@dataclass(frozen=True)
class RunConfig:
    """out: the folder that receives log, checkpoints and model. Intervals are in steps; a checkpoint's step is logged.

    steps, epochs: one of both. An epoch is every sample of the data once, or, of several sources, as many tokens as
    they hold, by their weights; a part of one counts samples.
    seed: an integer of 64 bits.
    precision: of the products of the layers, one of `PRECISIONS`; a CPU computes in float32 and takes "bf16" alone.
    recompute: on a GPU, one of `RECOMPUTE`, or "auto" for the first that fits.
    deterministic: a resumed run repeats every bit; a GPU then goes without cuDNN's attention.
    """

    out: str
    steps: int | None = None
    epochs: float | None = None
    seed: int = 0
    device: str = "auto"
    precision: str = "bf16"
    recompute: str = "auto"
    deterministic: bool = True
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("run.steps is missing, and so is run.epochs; give one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"run.steps = {self.steps} and run.epochs = {self.epochs:g} both say how long; give one")
        given = [name for name in ("steps", "epochs") if getattr(self, name) is not None]
        positive("run", self, *given, "log_every", "checkpoint_every", "keep_checkpoints")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"run.seed = {self.seed} must be an integer of 64 bits, such as 1")
        one_of("run", self, precision=PRECISIONS, recompute=("auto", *RECOMPUTE))


@dataclass(frozen=True)
class StartConfig:
    """What a run begins with, a folder or "builtin": a trained `model`; or, for a fresh one, only its `tokenizer`."""

    model: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.tokenizer is None):
            raise ValueError("[start] needs either a model, to go on from, or a tokenizer and a [model] table")

    @property
    def folder(self) -> Path:
        """Of the model, or of the tokenizer of a fresh one. Raises ValueError, naming the key, if there is none."""
        if self.model is not None:
            return existing_folder(self.model, "start.model")
        assert self.tokenizer is not None
        return existing_folder(self.tokenizer, "start.tokenizer")


@dataclass(frozen=True)
class SourceConfig:
    """folder: what `strata data` has written. weight: its share of the tokens, relative to the other sources."""

    folder: str
    weight: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """A step is `packs_per_step` packs of at most `tokens_per_pack` tokens, over all ranks.

    window: samples that are packed together; larger fills packs better. skip_corrupt: train without damaged shards.
    """

    sources: list[SourceConfig]
    tokens_per_pack: int
    packs_per_step: int = 1
    window: int = 1024
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        positive("data", self, "tokens_per_pack", "packs_per_step", "window")
        if not self.sources:
            raise ValueError("data.sources is empty; name at least one folder that `strata data` has written")


@dataclass(frozen=True)
class LearningRateSchedule:
    """See `strata.train.optimizer.config`. Lengths are in steps.

    decay: of "warmup_stable_decay" alone; "cosine" and "linear" fall from the end of the warm-up to that of the run.
    name: one of `SCHEDULES`. min_lr_factor: what the rate falls to, as a share of its peak.
    """

    warmup: int
    decay: int | None = None
    name: str = "warmup_stable_decay"
    min_lr_factor: float = 0.0

    def __post_init__(self) -> None:
        one_of("schedule", self, name=SCHEDULES)
        stays = self.name == "warmup_stable_decay"
        if stays and self.decay is None:
            raise ValueError(
                "schedule.decay is missing: the last steps of warmup_stable_decay; give it, or a schedule.name of "
                f"{', '.join(SCHEDULES[1:])}"
            )
        if not stays and self.decay is not None:
            raise ValueError(f"schedule.decay = {self.decay} is for warmup_stable_decay; remove it for {self.name}")
        for name in ("warmup", "decay"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"schedule.{name} = {getattr(self, name)} must not be negative")
        if not 0 <= self.min_lr_factor <= 1:
            raise ValueError(f"schedule.min_lr_factor = {self.min_lr_factor} must lie in [0, 1]")
        if self.name == "constant" and self.min_lr_factor:
            raise ValueError(f"schedule.min_lr_factor = {self.min_lr_factor} has no use in a constant rate; remove it")


@dataclass(frozen=True)
class ValidationConfig:
    """What a run is measured by and never trained on: `folder`, which `strata data` has written, or `share`, the part
    of each source's samples that is held out.

    every: steps between two evaluations; one more follows the last step. patience: the run stops after so many in a row
    without a loss that is lower, by more than min_delta, than the last one that was; None never stops it. keep_best:
    each lowest loss leaves a checkpoint, and the finished model is that of the lowest of all; None is yes with a
    patience.
    """

    folder: str | None = None
    share: float | None = None
    every: int = 100
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: bool | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.share is None):
            raise ValueError(
                "[validation] needs either a folder of `strata data`, or the share of the training data to hold out"
            )
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"validation.share = {self.share} must lie between 0 and 1, such as 0.05")
        positive("validation", self, "every", *(() if self.patience is None else ("patience",)))
        if not 0 <= self.min_delta < float("inf"):
            raise ValueError(f"validation.min_delta = {self.min_delta} must be 0 or more, and finite")
        if self.min_delta and self.patience is None:
            raise ValueError(f"validation.min_delta = {self.min_delta} says what patience waits for; set patience too")

    @property
    def keeps_best(self) -> bool:
        return self.patience is not None if self.keep_best is None else self.keep_best


@dataclass(frozen=True)
class BalanceConfig:
    """How the experts of a mixture are kept equally busy (`strata.train.steps.balance`).

    method: "loss", weighed by the model's router_aux_loss_coef; "bias", for which few families' format has a place; or
    "none". rate: by how much a step raises or lowers a bias.
    """

    method: str = "loss"
    rate: float = 1e-3

    def __post_init__(self) -> None:
        one_of("balance", self, method=BALANCE)
        positive("balance", self, "rate")

    def warning(self, model: ModelConfig) -> str:
        """What people should know before such a run, and after it; or ""."""
        if self.method != "bias" or (model.experts is not None and model.experts.biased):
            return ""
        return (
            "the finished model will route tokens without the bias that keeps its experts equally busy: its format has "
            "no place for it; checkpoints have it, and the log's losses are with it. balance.method = 'loss' needs none"
        )


@dataclass(frozen=True)
class EvaluateConfig:
    """Held-out questions of each exercise, answered greedily with at most `max_tokens` tokens."""

    examples: int = 300
    max_tokens: int = 384

    def __post_init__(self) -> None:
        positive("evaluate", self, "examples", "max_tokens")


@dataclass(frozen=True)
class ExportConfig:
    """Where the finished model goes, with its card, accuracy and log."""

    folder: str


@dataclass(frozen=True)
class TrainConfig:
    """A whole run.

    model: the fields of a config.json for a fresh model; the tokenizer supplies the special ids and, unless it is to be
    padded, vocab_size. parallel: how the ranks share the work; left out, `auto_layout` decides. balance: of a
    model with experts; left out, by the loss. validation: what it is measured by; left out, by nothing. lora: train
    adapters alone. dpo: learn preferences.
    """

    run: RunConfig
    start: StartConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: LearningRateSchedule
    model: dict[str, Any] | None = None
    parallel: Layout | None = None
    balance: BalanceConfig | None = None
    validation: ValidationConfig | None = None
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    lora: LoraConfig | None = None
    dpo: DpoConfig | None = None
    evaluate: EvaluateConfig | None = None
    export: ExportConfig | None = None

    def __post_init__(self) -> None:
        self._check_schedule()
        if (self.model is None) == (self.start.model is None):
            raise ValueError("a fresh model has a [model] table and start.tokenizer, a trained one start.model alone")
        if self.model is not None and (self.lora is not None or self.dpo is not None):
            raise ValueError("[lora] and [dpo] start from a trained model: remove [model], or those")
        if self.balance is not None and (self.lora is not None or self.dpo is not None):
            raise ValueError("[lora] and [dpo] leave experts as busy as they are: remove [balance], or those")
        for name, accepted in (("precision", PRECISIONS[:1]), ("recompute", ("auto", *RECOMPUTE_OF_MODULES))):
            given = getattr(self.run, name)
            if self.lora is not None and given not in accepted:
                raise ValueError(f"run.{name} = {given!r} is not for [lora]: use {' or '.join(map(repr, accepted))}")
        if self.export is not None and self.evaluate is None:
            raise ValueError("[export] writes a card with accuracies: add [evaluate], or remove [export]")

    def _check_schedule(self) -> None:
        steps, warmup, decay = self.run.steps, self.schedule.warmup, self.schedule.decay
        if steps is None or warmup + (decay or 0) <= steps:
            return
        both = f"schedule.warmup = {warmup}"
        if decay:
            both = f"schedule.warmup + schedule.decay = {warmup + decay}"
        raise ValueError(f"{both} exceeds run.steps = {steps}")


def read_train_config(path: Path, changes: Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """The run that a TOML file describes.

    changes: (section.key, value as TOML writes it) that replace what the file says. Raises ValueError for a missing
    file, an unknown key or a wrong value, which names the file and, where it is known, the line.
    """
    values, text = read_toml(path)
    changed = replaced(values, changes)
    asked = dict(changes)
    for section, key, other in _EITHER:
        table = changed.get(section)
        replaces = f"{section}.{key}" in asked and f"{section}.{other}" not in asked
        if replaces and isinstance(table, dict) and (key, table[key]) != ("name", SCHEDULES[0]):
            table.pop(other, None)
    try:
        return read_table(TrainConfig, changed)
    except WrongTable as error:
        key = ".".join(error.keys[:2]).partition("[")[0]
        if key in asked:
            raise ValueError(f"--{key}: {error}") from None
        line = line_of(text, error.keys)
        raise ValueError(f"{path}{'' if line is None else f', line {line}'}: {error}") from None


def check_trainable(config: ModelConfig) -> None:
    """Raises ValueError for a model that is not trained yet, neither whole nor by adapters."""
    if config.logit_softcap is not None:
        raise ValueError(
            f"final_logit_softcapping = {config.logit_softcap} is not supported in training, whose loss takes "
            "the head's products as they are; accepted is null"
        )
