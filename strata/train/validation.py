"""What a run is measured by and never trained on: its loss, the lowest so far, and when to stop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from strata.train.config import ValidationConfig
from strata.train.data.loader import OnceLoader
from strata.train.log.step_times import VALIDATION
from strata.train.phases import Phases
from strata.train.steps.parallel_step import ParallelStep

LOSS = "validation_loss"


@dataclass(frozen=True)
class ValidationProgress:
    """lowest: of all losses, at step `step`. reference: the last that was lower than the one before it by more than
    min_delta; `waited` evaluations have followed it.
    """

    lowest: float = math.inf
    step: int = 0
    reference: float = math.inf
    waited: int = 0

    def after(self, step: int, loss: float, min_delta: float) -> ValidationProgress:
        """Once a step was measured. A loss that is not a number is lower than none."""
        lowest, at = (loss, step) if loss < self.lowest else (self.lowest, self.step)
        if loss < self.reference - min_delta:
            return ValidationProgress(lowest, at, loss, 0)
        return ValidationProgress(lowest, at, self.reference, self.waited + 1)


class Validation:
    """The validation data of a run on this rank. All ranks call it alike, and find the same."""

    def __init__(self, config: ValidationConfig, loader: OnceLoader, phases: Phases) -> None:
        self._config, self._loader, self._phases = config, loader, phases
        self.progress = ValidationProgress()

    @property
    def stops(self) -> bool:
        """Whether patience is used up."""
        return self._config.patience is not None and self.progress.waited >= self._config.patience

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint the finished model is made of, if not of the last."""
        return self.progress.step if self._config.keeps_best and self.progress.step else None

    def measure(self, stepper: ParallelStep, step: int) -> dict[str, float]:
        """After a step: by its name in the log, the mean of each number over all that counts in the validation data."""
        self._phases.at(VALIDATION)
        stepper.sync_weights()
        sums: dict[str, Tensor] = {}
        for batches in self._loader:
            self._phases.at(VALIDATION)
            found = stepper.measured(batches)
            counted = found.pop("counted").double()
            for name, one in (*found.items(), ("counted", torch.ones_like(counted))):
                sums[name] = sums.get(name, torch.zeros_like(counted)) + one.double() * counted
        counted = sums.pop("counted")
        means = (torch.stack([*sums.values()]) / counted).tolist()
        values = {f"validation_{name}": value for name, value in zip(sums, means, strict=True)}
        self.progress = self.progress.after(step, values[LOSS], self._config.min_delta)
        return values

    def verdict(self) -> str:
        """Why the run stops."""
        best = self.progress
        if not best.step:
            return (
                f"early stopping: no validation loss was finite within validation.patience = {self._config.patience}; "
                "begin again with a lower optimizer.learning_rate"
            )
        wanted = best.reference - self._config.min_delta
        return (
            f"early stopping: no validation loss below {wanted:.4f} within validation.patience = "
            f"{self._config.patience}; the lowest, {best.lowest:.4f}, was of step {best.step}"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint, what JSON can hold."""
        told = {name: value if math.isfinite(value) else None for name, value in asdict(self.progress).items()}
        return told | {"made_of": self._loader.fingerprints}

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Go on from a checkpoint's. Returns whether that could be: losses of other data say nothing of these."""
        if state is None or state["made_of"] != self._loader.fingerprints:
            self.progress = ValidationProgress()
            return state is None
        lowest, reference = (math.inf if state[name] is None else state[name] for name in ("lowest", "reference"))
        self.progress = ValidationProgress(lowest, state["step"], reference, state["waited"])
        return True
