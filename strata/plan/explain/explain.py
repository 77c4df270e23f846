"""Explains a run: where its time went, what holds it back, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strata.cost.step_model import StepModel
from strata.engine.watch.verdict import Remedy
from strata.plan.explain.explanation import Explanation, Peaks, StepTime, Subject
from strata.plan.explain.findings import RuleInput, findings
from strata.plan.explain.measurement import EngineFacts, MeasuredStep, Measurement
from strata.plan.explain.split import NameOf, operation_name
from strata.plan.explain.verdict import Finding, ranked, verdict
from strata.plan.explain.waterfalls import of_latency, of_run, of_tail
from strata.plan.explain.what_if import WhatIf
from strata.text.counted import counted

# Findings that a probe tries.
_TRIED = 3
_WATERFALLS = {"run": of_run, "request": of_latency, "tail": of_tail}
_TITLES = {"run": "", "request": ", mean latency of a request", "tail": ", waits between tokens at p99"}
# Measures steps under other options of the engine, of a short form of the run.
Prober = Callable[[Mapping[str, Any]], Sequence[MeasuredStep]]


def explain(
    measured: Measurement,
    times: StepModel,
    *,
    wanted: StepModel | None = None,
    subject: Subject = "run",
    name_of: NameOf = operation_name,
    prober: Prober | None = None,
    sources: Sequence[str] = (),
) -> Explanation:
    """times: predicts the run's steps and their floors. wanted: the same in the dtype that was asked for, where the run
    has another. subject: what of the run is explained. name_of: see `split_steps`.
    prober: tries the remedies that promise most.

    Raises ValueError for a run without steps.
    """
    if not measured.steps:
        raise ValueError("no step was measured: there is nothing to explain")
    explained = _WATERFALLS[subject](measured, times, name_of)
    asked = RuleInput(measured, explained, times, wanted, WhatIf(measured, subject))
    found = findings(asked)
    evidence = [_intensity(asked)]
    if prober is not None:
        found = _tried(found, asked.what_if, prober)
        evidence += _halved(measured, prober)
    title = measured.title + _TITLES[subject]
    compute, bandwidth = times.device.known("compute", times.dtype), times.device.known("bandwidth")
    return Explanation(
        title,
        measured.product,
        explained.waterfall,
        verdict(explained, found, evidence, _more_at_once(asked)),
        explained.operations,
        tuple(
            StepTime(one.begin, one.end, one.kind, one.tokens, len(one.chunks), _kv_share(one, measured.facts))
            for one in measured.steps
        ),
        (*sources, *times.sources),
        None if compute is None or bandwidth is None else Peaks(compute.value, bandwidth.value),
    )


def _kv_share(step: MeasuredStep, facts: EngineFacts) -> float:
    """Of the pages, as if no two sequences shared any."""
    pages = sum(-(-(chunk.start + chunk.tokens) // facts.page_size) for chunk in step.chunks)
    return min(1.0, pages * facts.page_size / facts.kv_tokens) if facts.kv_tokens else 0.0


def _tried(found: Sequence[Finding], what_if: WhatIf, prober: Prober) -> list[Finding]:
    tried, left = [], _TRIED
    for one in found:
        if one.change is None or not left:
            tried.append(one)
            continue
        left -= 1
        steps = prober(one.change)
        gain = what_if.gain(one.options, steps=steps, replaces=one.replaces)
        what = one.remedies[0].what
        tried.append(one.tried(gain, f"tried on {counted(len(steps), 'step')}: {what} saves {gain:.0%}"))
    return ranked(tried)


def _halved(measured: Measurement, prober: Prober) -> list[str]:
    """What half the batch does to decode steps: if they take as long, they do not wait for its products."""
    widest = max(len(step.chunks) for step in measured.steps)
    usual = _decode_seconds(measured.steps, widest)
    if widest < 2 or usual is None:
        return []
    halved = _decode_seconds(prober({"max_num_seqs": widest // 2}), widest // 2)
    if halved is None:
        return []
    return [
        f"tried with {widest // 2} instead of {widest} sequences: decode steps take {halved / usual:.0%} of the time"
    ]


def _decode_seconds(steps: Sequence[MeasuredStep], sequences: int) -> float | None:
    """The median of steps of so many, by the processor's time where that is known; None if there is none."""
    found = [
        step.seconds if step.processor is None else step.processor
        for step in steps
        if step.kind == "decode" and len(step.chunks) == sequences
    ]
    return statistics.median(found) if found else None


def _intensity(asked: RuleInput) -> str:
    """How much the operations compute for each byte."""
    flops = sum(one.flops for one in asked.explained.operations)
    moved = sum(one.bytes for one in asked.explained.operations)
    peaks = asked.times.device
    compute, bandwidth = peaks.ceiling("compute", asked.times.dtype).value, peaks.ceiling("bandwidth").value
    return f"{flops / max(1, moved):.1f} FLOPs a byte; {compute / bandwidth:.0f} would keep the products busy"


def _more_at_once(asked: RuleInput) -> Iterator[Remedy]:
    """What twice the requests would save of each one's time, where steps hardly grow with them. A workload of one
    request has no other that could run beside it."""
    run, what_if = asked.measured, asked.what_if
    if what_if.subject == "run" and 2 <= len(run.requests) <= run.facts.slots // 2:
        gain = 1 - (1 - what_if.gain(requests=[*run.requests, *run.requests])) / 2
        yield Remedy("twice the requests at once", gain)
