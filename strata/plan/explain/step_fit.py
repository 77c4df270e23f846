"""How long steps of a run take, as a line through those that were measured: for what did not run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from strata.hardware.prediction import nonnegative_fit
from strata.hardware.roofline import Workload
from strata.plan.explain.measurement import MeasuredStep


@dataclass(frozen=True)
class StepFit:
    """seconds = weights x features, none below zero. The features: steps of decodes alone and steps with prompts, each
    with a constant of its own, since the first wait for weights and the second compute; tokens; keys that decodes read;
    pairs of a prompt's query and a key that it sees."""

    weights: tuple[float, ...]

    @staticmethod
    def of(steps: Iterable[MeasuredStep]) -> StepFit:
        """By the median of steps alike, each as much as any other in proportion to its time; of a step on the host's
        own processors, by the time it had one. Raises ValueError without a step."""
        alike: dict[tuple[int, ...], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
        for step in steps:
            seconds = step.seconds if step.processor is None else min(step.seconds, step.processor)
            if seconds > 0 and not step.compiled:
                features = _features(step.workload)
                alike[tuple(round(4 * math.log2(1 + value)) for value in features)].append((features, seconds))
        if not alike:
            raise ValueError("no step was measured: nothing can be said of others")
        rows, targets = [], []
        for group in alike.values():
            features, seconds = sorted(group, key=lambda one: one[1])[len(group) // 2]
            targets.append(math.sqrt(len(group)))
            rows.append([targets[-1] / seconds * value for value in features])
        return StepFit(tuple(map(float, nonnegative_fit(rows, targets))))

    def seconds(self, workload: Workload) -> float:
        return math.fsum(w * value for w, value in zip(self.weights, _features(workload), strict=True))


def _features(workload: Workload) -> tuple[float, ...]:
    keys = pairs = prompts = 0
    for new, total in zip(workload.new, workload.total, strict=True):
        if new == 1:
            keys += total
        else:
            prompts += 1
            pairs += new * (total - new) + new * (new + 1) // 2
    return float(not prompts), float(prompts > 0), float(workload.tokens), float(keys), float(pairs)
