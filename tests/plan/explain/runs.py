"""Runs of a made-up device under a virtual clock: what explains them is compared with how they were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from strata.hardware.figures import Device, Figure
from strata.hardware.roofline import Workload
from strata.plan.explain.measurement import EngineFacts, MeasuredRequest, MeasuredStep, Measurement
from strata.plan.explain.replay import replay

DTYPES = ("float32", "bfloat16")
FIGURES = [Figure("bandwidth", 2e10, "made up", "2026-11-23", measured=True)] + [
    Figure("compute", rate, "made up", "2026-11-23", dtype, measured=True)
    for dtype, rate in zip(DTYPES, (1e11, 4e11), strict=True)
]
DEVICE = Device("made-up", "Made-up Processor", tuple(FIGURES))
BETWEEN = 2e-5
FACTS = EngineFacts("builtin", "bfloat16", "bfloat16", 64, 2048, 1024, 32768, 16, caches_prefixes=True)


def law(workload: Workload) -> float:
    """Seconds of a step: no line, so that a line through some steps is not the law. Products take the longer of reading
    weights and computing; each sequence and key has its price."""
    decodes = sum(total for new, total in zip(workload.new, workload.total, strict=True) if new == 1)
    pairs = sum(new * total for new, total in zip(workload.new, workload.total, strict=True) if new > 1)
    return max(2e-3, 4e-5 * workload.tokens) + 5e-5 * len(workload.new) + 2e-8 * decodes + 3e-9 * pairs + 4e-4


def requests(*shapes: tuple[int, int], shared: int = 0) -> tuple[MeasuredRequest, ...]:
    """Of these lengths of prompts and outputs, the first `shared` ids alike."""
    return tuple(
        MeasuredRequest(tuple(range(shared)) + tuple(7 + index for _ in range(prompt - shared)), output)
        for index, (prompt, output) in enumerate(shapes)
    )


def wall(
    asked: Sequence[MeasuredRequest],
    facts: EngineFacts = FACTS,
    seconds: Callable[[Workload], float] = law,
    between: float = BETWEEN,
) -> float:
    """How long a run takes."""
    return replay(asked, facts, seconds, between).wall


def run(
    asked: Sequence[MeasuredRequest],
    facts: EngineFacts = FACTS,
    seconds: Callable[[Workload], float] = law,
    between: float = BETWEEN,
    change: Callable[[MeasuredStep], MeasuredStep] = lambda step: step,
    **others: Any,
) -> Measurement:
    """What would be measured of it. change: what is different of each step."""
    ran = replay(asked, facts, seconds, between)
    steps = tuple(map(change, ran.steps))
    timed = tuple(
        replace(one, times=times, sequence=index)
        for index, (one, times) in enumerate(zip(asked, ran.times, strict=True))
    )
    given: Mapping[str, Any] = {"preemptions": ran.preemptions} | others
    return Measurement("made up", DEVICE.product, ran.wall, steps, timed, facts, **given)
