"""Which optimizer a run uses and its constants, checked when they are read; and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.train.checks import one_of, positive

NAMES = ("adamw", "muon")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019), or Muon (Jordan et al. 2024) for the matrices of the layers with AdamW for
    the rest. Weight decay applies to matrices except the embedding.

    clip: the largest Euclidean norm of the whole gradient. momentum: of Muon. offload: masters and moments lie in
    pinned host memory and stream through the GPU during the update.
    """

    learning_rate: float
    name: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    momentum: float = 0.95
    offload: bool = False

    def __post_init__(self) -> None:
        one_of("optimizer", self, name=NAMES)
        positive("optimizer", self, "learning_rate", "eps")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip = {self.clip} must be positive; inf clips nothing")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay = {self.weight_decay} must not be negative or infinite")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)} must lie in [0, 1)")


def learning_rate(
    step: int,
    *,
    peak: float,
    steps: int,
    warmup: int,
    decay: int | None = None,
    name: str = "warmup_stable_decay",
    min_lr_factor: float = 0.0,
) -> float:
    """The rate of step `step` (0 is the first) of `steps`.

    Warm-up reaches `peak` with step `warmup` - 1. Then "warmup_stable_decay" (WSD, Hu et al. 2024) stays there and
    falls linearly in the last `decay` steps, "linear" and "cosine" fall in all that are left, "constant" stays. What
    falls begins at `peak` and would be `min_lr_factor` times that one step after the last.
    """
    if step < warmup:
        return peak * ((step + 1) / warmup)
    if name == "constant":
        return peak
    falls = steps - warmup if decay is None else decay
    left = (steps - step) / falls if step > steps - falls else 1.0
    if name == "cosine":
        left = (1 + math.cos(math.pi * (1 - left))) / 2
    return peak * (min_lr_factor + (1 - min_lr_factor) * left)
