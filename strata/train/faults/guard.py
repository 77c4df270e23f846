"""Judges a run by its losses and gradient norms: go on, note it, roll back, or stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from strata.train.faults.config import FaultsConfig

# The median absolute deviation of a normal distribution times this is its standard deviation.
_SIGMA_OF_MAD = 1.4826
# Losses that scatter less than this share of their median are taken to scatter so much: a run that has converged to
# almost one value would call anything a spike.
_MIN_SCATTER = 1e-3


class VerdictKind(Enum):
    """What to do after a step. SKIPPED and SPIKE: go on, and log the reason."""

    OK = "ok"
    SKIPPED = "skipped"
    SPIKE = "spike"
    ROLLBACK = "rollback"
    STOP = "stop"


@dataclass(frozen=True)
class StepVerdict:
    """reason: one line for a person. before: for ROLLBACK; the step that no checkpoint to go back to may contain."""

    kind: VerdictKind
    reason: str = ""
    before: int = 0


_FINE = StepVerdict(VerdictKind.OK)


def _stop(reason: str) -> StepVerdict:
    return StepVerdict(VerdictKind.STOP, reason)


class LossGuard:
    """Sees every step's loss and norm in order; alike on all ranks, which see the same numbers.

    A step whose gradient is not finite has left weights and optimizer as they were (its scale was 0). Losses spike when
    they exceed the median of the last ones by many standard deviations, estimated from the median absolute deviation,
    which a few outliers do not move. Rolling back skips the samples of the steps that spiked, because the same samples
    do no harm to other weights (Chowdhery et al. 2022, section 5.1): the steps up to there are repeated, and from there
    on `data_step` is ahead of the step.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skipped: list[tuple[int, float]] = []  # step and norm, of the steps without a break before the next
        self._spikes: list[int] = []  # likewise
        self._left_out: list[tuple[int, int]] = []  # of the data's steps; first and last
        self._rolled_back_at: int | None = None

    def data_step(self, step: int) -> int:
        """Which step's samples a step trains on, both from 1, when the samples of some are left out."""
        for first, last in self._left_out:
            if step >= first:
                step += last - first + 1
        return step

    def observe(self, step: int, loss: float, norm: float) -> StepVerdict:
        """Judge a step, counted from 1. norm: of the gradient before clipping."""
        if not math.isfinite(norm):
            return self._skip(step, loss, norm)
        self._skipped.clear()
        if not math.isfinite(loss):
            return _stop(
                f"step {step}: the loss is {loss}, but its gradient has the norm {norm:.3g}, so the weights have "
                f"changed; resume from the last checkpoint with a lower optimizer.learning_rate"
            )
        limit = self._limit()
        self._losses.append(loss)
        if self._config.spike == "ignore" or loss <= limit:
            self._spikes.clear()
            return _FINE
        self._spikes.append(step)
        reason = f"step {step}: loss {loss:.4g} spikes above {limit:.4g} (gradient norm {norm:.3g})"
        if self._config.spike == "report" or len(self._spikes) <= self._config.max_spikes:
            return StepVerdict(VerdictKind.SPIKE, reason)
        return self._roll_back(step, reason)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: a guard that restores it judges what follows as this one does."""
        return {
            "losses": list(self._losses),
            "skipped": [[step, str(norm)] for step, norm in self._skipped],  # JSON knows no infinity
            "spikes": list(self._spikes),
            "left_out": [list(span) for span in self._left_out],
            "rolled_back_at": self._rolled_back_at,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. With a smaller window than it was made with, the newest losses stay."""
        self.roll_back(state)
        self._left_out = [(first, last) for first, last in state["left_out"]]
        self._rolled_back_at = state["rolled_back_at"]

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """After ROLLBACK, go back to the state of an earlier checkpoint, remembering why: what is left out stays so."""
        self._losses = deque(state["losses"], maxlen=self._config.spike_window)
        self._skipped = [(step, float(norm)) for step, norm in state["skipped"]]
        self._spikes = list(state["spikes"])

    def _skip(self, step: int, loss: float, norm: float) -> StepVerdict:
        self._skipped.append((step, norm))
        count, most = len(self._skipped), self._config.max_skipped
        shown = f"loss {loss:.4g}, gradient norm {norm}"
        if self._config.non_finite == "stop":
            return _stop(
                f"step {step}: {shown}: not finite; lower optimizer.learning_rate and resume from the last checkpoint, "
                f'or set faults.non_finite = "skip"'
            )
        if count <= most:
            return StepVerdict(
                VerdictKind.SKIPPED, f"step {step}: {shown}: not finite; skipped ({count} in a row, at most {most})"
            )
        norms = ", ".join(str(one) for _, one in self._skipped)
        return _stop(
            f"steps {self._skipped[0][0]} to {step} have gradients that are not finite (norms {norms}), more in a row "
            f"than faults.max_skipped = {most}; lower optimizer.learning_rate and resume from the last checkpoint"
        )

    def _limit(self) -> float:
        """The largest loss that is no spike; without limit until there are enough to judge by."""
        if len(self._losses) < self._config.spike_window:
            return math.inf
        middle = median(self._losses)
        scatter = _SIGMA_OF_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle + self._config.spike_sigma * max(scatter, _MIN_SCATTER * abs(middle))

    def _roll_back(self, step: int, reason: str) -> StepVerdict:
        first, window = self._spikes[0], self._config.spike_window
        if self._rolled_back_at is not None and first - self._rolled_back_at <= window:
            return _stop(
                f"{reason}, within {window} steps of step {self._rolled_back_at}, which was rolled back: it is not the "
                f"samples; lower optimizer.learning_rate and resume from the last checkpoint"
            )
        samples = self.data_step(first), self.data_step(step)
        self._left_out.append(samples)
        self._rolled_back_at = step
        return StepVerdict(
            VerdictKind.ROLLBACK,
            f"{reason}, as have all since step {first}; back to before it, and on without the samples of steps "
            f"{samples[0]} to {samples[1]}",
            before=first,
        )
