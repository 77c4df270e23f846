"""What a run does about faults, as its configuration says it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.train.checks import one_of, positive

NON_FINITE = ("skip", "stop")
SPIKES = ("ignore", "report", "rollback")


@dataclass(frozen=True)
class FaultsConfig:
    """Bad numbers: see `LossGuard`. Hangs: see `HangWatch`. Slow ranks: see `Stragglers`.

    non_finite: "skip" steps whose gradient is not finite, at most `max_skipped` in a row, or "stop" at the first.
    spike: what follows when a loss exceeds the median of the last `spike_window` by more than `spike_sigma` standard
    deviations, more than `max_spikes` times in a row for "rollback".
    hang_seconds: without progress for so long, a rank hangs; 0 watches for none.
    straggler_share: a rank is slow when it takes longer than the median by this share, in `straggler_intervals`
    intervals of the log in a row.
    """

    non_finite: str = "skip"
    max_skipped: int = 5
    spike: str = "report"
    spike_sigma: float = 8.0
    spike_window: int = 128
    max_spikes: int = 2
    hang_seconds: float = 300.0
    straggler_share: float = 0.1
    straggler_intervals: int = 3

    def __post_init__(self) -> None:
        one_of("faults", self, non_finite=NON_FINITE, spike=SPIKES)
        # Fewer losses than in such a window say nothing of how they scatter.
        least = {"max_skipped": 0, "spike_window": 8, "max_spikes": 0, "straggler_intervals": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"faults.{name} = {getattr(self, name)} must be at least {value}")
        positive("faults", self, "spike_sigma", "straggler_share")
        if self.hang_seconds != 0 and not (1 <= self.hang_seconds < math.inf):
            raise ValueError(f"faults.hang_seconds = {self.hang_seconds} must be at least 1, or 0 to watch for none")

    @property
    def collective_seconds(self) -> float:
        """For `join_world`: longer than it takes to notice and report a hang, so that the report comes first."""
        return max(600.0, 2 * self.hang_seconds)
