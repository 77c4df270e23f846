"""The learning rate: linear warm-up, stable, linear decay to zero (WSD, Hu et al. 2024)."""

from __future__ import annotations


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, decay: int) -> float:
    """The rate of step `step` (0 is the first) of `steps`.

    Warm-up reaches `peak` with step `warmup` - 1. The last `decay` steps fall linearly; one more would be 0.
    """
    rising = (step + 1) / warmup if step < warmup else 1.0
    falling = (steps - step) / decay if step > steps - decay else 1.0
    return peak * min(rising, falling)
