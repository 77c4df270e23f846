"""The learning rate: linear warm-up, then stable, falling or both."""

from __future__ import annotations

import math


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
