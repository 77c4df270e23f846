"""From what was measured down to the floor: of a whole run, of a request, of the longest waits between two tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from strata.cost.step_model import StepModel
from strata.plan.explain.explanation import Explained, LostTime
from strata.plan.explain.measurement import MeasuredStep, Measurement
from strata.plan.explain.split import TAKEN, NameOf, StepSplit, operation_name, split_steps
from strata.plan.explain.step_fit import StepFit

TOKENIZATION = "tokenization"
BETWEEN = "host between steps"
QUEUEING = "queueing until its first step"
SCHEDULED = "steps that are less full than the work allows"
# Of the gaps between two tokens those whose rank is so near to the 99th percentile, as a share of all.
_NEAR = 0.01


def of_run(measured: Measurement, times: StepModel, name_of: NameOf = operation_name) -> Explained:
    """The wall time. Its floor is that of the fullest steps that the work allows, where that is known."""
    split = split_steps(measured, times, name_of)
    least = split.floor if measured.ideal is None else min(measured.ideal, split.floor)
    named = [LostTime(name, "system", "host", seconds) for name, seconds in measured.host.items()]
    lost = LostTime(TAKEN, "system", "host", measured.lost_between)
    scheduled = LostTime(SCHEDULED, "system", "scheduling", split.floor - least)
    return _explained(measured.wall, measured.stepping, split, least, [*named, lost, scheduled])


def of_tail(measured: Measurement, times: StepModel, name_of: NameOf = operation_name) -> Explained:
    """One wait between two tokens of a request, the mean of those about the 99th percentile.

    Raises ValueError if no request got two tokens at known times.
    """
    gaps = sorted((after - before, before, after) for one in measured.requests for before, after in pairwise(one.times))
    if not gaps:
        raise ValueError("no request got two tokens: there is no wait between tokens to explain")
    near = [gap for rank, gap in enumerate(gaps) if abs((rank + 0.5) / len(gaps) - 0.99) <= _NEAR]
    chosen = near or gaps[-1:]
    fit, ends = StepFit.of(measured.steps), [step.end for step in measured.steps]
    weights = [0.0] * len(ends)
    for _, before, after in chosen:
        for index in range(bisect_right(ends, before), bisect_right(ends, after)):
            weights[index] += 1 / len(chosen)
    others = [
        _share_of_prompts(step, fit) if weight else 0.0 for step, weight in zip(measured.steps, weights, strict=True)
    ]
    split = split_steps(measured, times, name_of, others, weights)
    return _explained(math.fsum(gap for gap, _, _ in chosen) / len(chosen), _weighted(measured, weights), split)


def of_latency(measured: Measurement, times: StepModel, name_of: NameOf = operation_name) -> Explained:
    """The mean time of a request from its arrival to its last token. The floor is that of the steps which it was in.

    Raises ValueError if no request's times are known.
    """
    requests = [one for one in measured.requests if one.times]
    if not requests:
        raise ValueError("no request's times are known: there is no latency to explain")
    holding: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(measured.steps):
        for chunk in step.chunks:
            holding[chunk.sequence].append(index)
    until = list(accumulate((step.seconds for step in measured.steps), initial=0.0))
    weights = [0.0] * len(measured.steps)
    queued = delivered = others = whole = 0.0
    for request in requests:
        inside = holding[request.sequence]
        first, last = inside[0], inside[-1]
        for index in inside:
            weights[index] += 1 / len(requests)
        queued += measured.steps[first].begin - request.due
        delivered += request.times[-1] - measured.steps[last].end
        others += until[last + 1] - until[first] - math.fsum(measured.steps[index].seconds for index in inside)
        whole += request.times[-1] - request.due
    parts = (
        LostTime(QUEUEING, "system", "queueing", queued / len(requests)),
        LostTime("steps of others, between its own", "system", "scheduling", others / len(requests)),
        LostTime("delivery", "system", "host", delivered / len(requests)),
    )
    split = split_steps(measured, times, name_of, weights=weights)
    return _explained(whole / len(requests), _weighted(measured, weights), split, more=parts)


def _explained(
    whole: float, stepping: float, split: StepSplit, least: float | None = None, more: Sequence[LostTime] = ()
) -> Explained:
    """What is neither steps nor named is the host's between steps. least: the floor, where it is not the split's."""
    beside = math.fsum(part.seconds for part in more if part.name != SCHEDULED)
    rest = LostTime(BETWEEN, "system", "host", whole - stepping - beside)
    least = split.floor if least is None else least
    return Explained.of(whole, least, (rest, *more, *split.parts), split.operations, split.bound)


def _weighted(measured: Measurement, weights: Sequence[float]) -> float:
    return math.fsum(weight * step.seconds for weight, step in zip(weights, measured.steps, strict=True))


def _share_of_prompts(step: MeasuredStep, fit: StepFit) -> float:
    """How much shorter the step would be with its decodes alone."""
    decodes = tuple(chunk for chunk in step.chunks if chunk.tokens == 1)
    if len(decodes) == len(step.chunks):
        return 0.0
    whole = fit.seconds(step.workload)
    if not decodes or not whole:
        return 1.0
    return max(0.0, 1 - fit.seconds(replace(step, chunks=decodes).workload) / whole)
