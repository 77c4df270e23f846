"""How far predicted times lie from measured ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from strata.cost.step_model import StepModel
from strata.hardware.prediction import ORIGINS
from strata.hardware.roofline import Workload
from strata.plan.explain.measurement import MeasuredStep

# What a device waits between two steps where the host is ahead; longer, and the step stands for itself.
_BETWEEN = 200e-6


@dataclass(frozen=True)
class StepError:
    """One kind of step of a case. sequences, tokens: of the step; keys: tokens of its sequences, those that were cached
    included. measured, predicted: seconds from its beginning to that of the next. steps: how many both are the median
    of. origin: see `Prediction`."""

    case: str
    kind: str
    sequences: int
    tokens: int
    keys: int
    steps: int
    measured: float
    predicted: float
    origin: str

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured: above 0 where it is too slow."""
        return self.predicted / self.measured - 1

    def values(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True)
class ErrorSummary:
    """Of so many: the median and the ninth tenth of absolute errors, and the median with its sign."""

    count: int
    median: float
    p90: float
    signed: float

    @staticmethod
    def of(errors: Sequence[float]) -> ErrorSummary:
        """Raises ValueError without an error."""
        if not errors:
            raise ValueError("nothing was measured that a prediction could be held against")
        absolute = sorted(abs(error) for error in errors)
        p90 = absolute[-(-9 * len(absolute) // 10) - 1]
        return ErrorSummary(len(errors), statistics.median(absolute), p90, statistics.median(errors))

    def text(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%}, with its sign {self.signed:+.1%}, of {self.count}"


def step_errors(case: str, runs: Iterable[Sequence[MeasuredStep]], times: StepModel) -> list[StepError]:
    """The steps of several runs of a case, those with as many sequences and tokens together, in order.

    A decode step lasts until the next begins, if that follows at once; any other for itself, and what is around a step
    is left out of its prediction.
    """
    alike: dict[tuple[str, int, int], list[tuple[float, Workload]]] = defaultdict(list)
    for steps in runs:
        following = [*(step.begin for step in steps[1:]), None]
        for step, after in zip(steps, following, strict=True):
            if step.compiled:
                continue
            gap = _BETWEEN if after is None else after - step.end
            seconds = step.seconds + (gap if gap < _BETWEEN else times.around)
            alike[step.kind, len(step.chunks), step.tokens].append((seconds, step.workload))
    found = []
    for (kind, sequences, tokens), group in alike.items():
        seconds = statistics.median(one for one, _ in group)
        each = {workload: times.predict(workload) for _, workload in group}
        predicted = statistics.median(each[workload].seconds for _, workload in group)
        origin = max((one.origin for one in each.values()), key=ORIGINS.index)
        keys = statistics.median_low(sum(workload.total) for _, workload in group)
        found.append(StepError(case, kind, sequences, tokens, keys, len(group), seconds, predicted, origin))
    return found
