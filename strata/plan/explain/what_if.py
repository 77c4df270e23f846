"""What a change would save: a run's requests through the engine's scheduler, with steps as they were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from strata.plan.explain.explanation import Subject
from strata.plan.explain.measurement import MeasuredRequest, MeasuredStep, Measurement
from strata.plan.explain.replay import Replayed, replay
from strata.plan.explain.step_fit import StepFit
from strata.plan.explain.waterfalls import TOKENIZATION

# Which wait of a run counts.
_TAIL = 0.99


@dataclass(frozen=True)
class WhatIf:
    """subject: what is explained."""

    measured: Measurement
    subject: Subject = "run"

    @cached_property
    def fit(self) -> StepFit:
        return StepFit.of(self.measured.steps)

    @cached_property
    def between(self) -> float:
        """Seconds between two steps, without what the host did before the first, and without waits for a request."""
        if any(request.due for request in self.measured.requests):
            gaps = [after.begin - before.end for before, after in pairwise(self.measured.steps)]
            return max(0.0, statistics.median(gaps)) if gaps else 0.0
        named = math.fsum(self.measured.host.values())
        return max(0.0, self.measured.between - named) / len(self.measured.steps)

    @cached_property
    def base(self) -> Replayed:
        """The run as it was, by the fit."""
        return replay(self.measured.requests, self.measured.facts, self.fit.seconds, self.between)

    @cached_property
    def replayed_share(self) -> float:
        """Of the run, what the replay tells of: not tokenization, nor what other work took of the processors."""
        if self.subject != "run":
            return 1.0
        lost = self.measured.lost_between + math.fsum(
            max(0.0, step.seconds - step.processor) for step in self.measured.steps if step.processor is not None
        )
        return max(0.0, 1 - (self.measured.host.get(TOKENIZATION, 0.0) + lost) / self.measured.wall)

    def gain(
        self,
        changes: Mapping[str, int | bool] | None = None,
        requests: Sequence[MeasuredRequest] | None = None,
        steps: Sequence[MeasuredStep] = (),
        *,
        replaces: bool = False,
    ) -> float:
        """The share of the measured time that a change saves; negative if it costs time.

        changes: of the engine's facts. requests: instead of the run's. steps: that were measured under the change; they
        join those of the run, or replace them.
        """
        if not self.measured.requests:
            return 0.0
        fit = self.fit
        if steps:
            fit = StepFit.of(steps if replaces else (*self.measured.steps, *steps))
        run = self.measured
        facts = replace(run.facts, **(changes or {}))  # type: ignore[arg-type]  # fields by name
        try:
            base = self.base if replaces or not steps else replay(run.requests, run.facts, fit.seconds, self.between)
            changed = replay(requests or run.requests, facts, fit.seconds, self.between)
        except ValueError:  # what a made up pool cannot hold is no remedy
            return 0.0
        before, after = self._seconds(base), self._seconds(changed)
        return self.replayed_share * (1 - after / before) if before else 0.0

    def _seconds(self, replayed: Replayed) -> float:
        if self.subject == "run":
            return replayed.wall
        if self.subject == "request":
            return statistics.fmean(replayed.latencies)
        gaps = replayed.gaps
        return gaps[min(len(gaps) - 1, math.floor(_TAIL * len(gaps)))] if gaps else 0.0
