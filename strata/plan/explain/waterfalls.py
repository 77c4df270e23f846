"""From what was measured down to the floor: of a whole run, or of its longest waits between two tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from strata.plan.explain.explanation import OperationTime
from strata.plan.explain.measurement import MeasuredStep, Measurement
from strata.plan.explain.split import TAKEN, NameOf, StepSplit, operation_name, split_steps
from strata.plan.explain.step_fit import StepFit
from strata.plan.step_seconds import StepSeconds
from strata.plan.waterfall import Part, Waterfall

TOKENIZATION = "tokenization"
BETWEEN = "host between steps"
# A part so small, as a share of what was measured, is the rounding of a difference.
_NOTHING = 1e-6
# Of the gaps between two tokens those whose rank is so near to the 99th percentile, as a share of all.
_NEAR = 0.01


@dataclass(frozen=True)
class Explained:
    """A waterfall, and the operations that it is made of."""

    waterfall: Waterfall
    operations: tuple[OperationTime, ...]


def of_run(measured: Measurement, times: StepSeconds, name_of: NameOf = operation_name) -> Explained:
    """The wall time. Its floor is that of the fullest steps that the work allows, where that is known."""
    split = split_steps(measured, times, name_of)
    least = split.floor if measured.ideal is None else min(measured.ideal, split.floor)
    scheduled = Part("steps that are less full than the work allows", "system", "scheduling", split.floor - least)
    return _explained(measured, split, least, [scheduled])


def of_tail(measured: Measurement, times: StepSeconds, name_of: NameOf = operation_name) -> Explained:
    """One wait between two tokens of a request, the mean of those about the 99th percentile.

    Raises ValueError if no request got two tokens at known times.
    """
    gaps = sorted(
        ((after - before, before, after) for one in measured.requests for before, after in pairwise(one.times)),
    )
    if not gaps:
        raise ValueError("no request got two tokens: there is no wait between tokens to explain")
    chosen = [gap for rank, gap in enumerate(gaps) if abs((rank + 0.5) / len(gaps) - 0.99) <= _NEAR] or gaps[-1:]
    fit = StepFit.of(measured.steps)
    steps = [step for _, before, after in chosen for step in _within(measured.steps, before, after)]
    foreign = [_share_of_prompts(step, fit) for step in steps]
    length = math.fsum(gap for gap, _, _ in chosen)
    # Steps as often as they were waited for: what they computed again is not told by their order.
    part = replace(measured, wall=length, steps=tuple(steps), host={}, ideal=None, processor=None)
    split = split_steps(part, times, name_of, foreign, counts_again=False)
    whole = _explained(part, split, split.floor, [])
    return _divided(whole, len(chosen))


def _explained(measured: Measurement, split: StepSplit, least: float, more: Sequence[Part]) -> Explained:
    named = [Part(name, "system", "host", seconds) for name, seconds in measured.host.items()]
    rest = measured.wall - measured.stepping - measured.lost_between - math.fsum(part.seconds for part in named)
    lost = Part(TAKEN, "system", "host", measured.lost_between)
    parts = _together([*named, Part(BETWEEN, "system", "host", rest), lost, *more, *split.parts])
    kept = [part for part in parts if abs(part.seconds) > _NOTHING * measured.wall]
    ordered = sorted(kept, key=lambda part: part.seconds, reverse=True)
    return Explained(Waterfall(measured.wall, least, tuple(ordered)), split.operations)


def _together(parts: Sequence[Part]) -> list[Part]:
    """Parts of one name as one."""
    found: dict[str, Part] = {}
    for part in parts:
        before = found.get(part.name)
        found[part.name] = part if before is None else replace(part, seconds=part.seconds + before.seconds)
    return list(found.values())


def _divided(whole: Explained, count: int) -> Explained:
    parts = tuple(replace(part, seconds=part.seconds / count) for part in whole.waterfall.parts)
    operations = tuple(
        replace(
            one,
            seconds=one.seconds / count,
            floor=one.floor / count,
            flops=round(one.flops / count),
            bytes=round(one.bytes / count),
        )
        for one in whole.operations
    )
    fall = whole.waterfall
    return Explained(Waterfall(fall.measured / count, fall.floor / count, parts), operations)


def _within(steps: Sequence[MeasuredStep], before: float, after: float) -> list[MeasuredStep]:
    """Steps that end in the wait."""
    return [step for step in steps if before < step.end <= after]


def _share_of_prompts(step: MeasuredStep, fit: StepFit) -> float:
    """How much shorter the step would be with its decodes alone."""
    decodes = tuple(chunk for chunk in step.chunks if chunk.tokens == 1)
    if len(decodes) == len(step.chunks):
        return 0.0
    whole = fit.seconds(step.workload)
    if not decodes or not whole:
        return 1.0
    return max(0.0, 1 - fit.seconds(replace(step, chunks=decodes).workload) / whole)
