"""Which optimizer a run uses and its constants, checked when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        if self.name not in NAMES:
            raise ValueError(f"optimizer.name = {self.name!r} must be one of {', '.join(NAMES)}")
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)} must be positive and finite")
        if not self.clip > 0:
            raise ValueError(f"optimizer.clip = {self.clip} must be positive; inf clips nothing")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay = {self.weight_decay} must not be negative or infinite")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} = {getattr(self, name)} must lie in [0, 1)")
