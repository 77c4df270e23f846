"""Explains a training run: where its time went, what holds it back, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.engine.watch.verdict import Remedy
from strata.plan.explain.explanation import Explanation, StepTime
from strata.plan.explain.verdict import verdict
from strata.plan.report.units import seconds
from strata.plan.training_explain.findings import TrainingRuleInput, findings
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.plan.training_explain.run_floor import run_floor
from strata.plan.training_explain.run_waterfall import explained_run
from strata.text.counted import counted

# Beyond so many, a step of the timeline is an interval of the log.
_MAX_STEPS = 5000
# What saves less is worth a line, but does not make a run what the verdict calls it.
_NAMED = 0.08


def explain_run(run: RecordedRun) -> Explanation:
    """The waterfall of all steps of a run, per rank, and the verdict. Raises ValueError for a device of which nothing
    is known."""
    floor = run_floor(run)
    explained = explained_run(run, floor)
    asked = TrainingRuleInput(run, floor, explained)
    what, each = run.what, counted(run.whole.tokens / run.whole.steps, "token")
    ranks = f", {what.layout.ranks} ranks" if what.layout.ranks > 1 else ""
    title = f"Training {run.folder.name}: {counted(run.whole.steps, 'step')} of {each}{ranks}"
    sources = list(floor.sources)
    if run.trace is not None:
        sources.append(f"work by kind: {run.trace.table.steps} traced steps, taken as all")
    elif what.kind == "cuda":
        sources.append("no step was traced (strata train --profile 10-12): what lies within steps is predicted")
    return Explanation(
        title,
        what.device,
        explained.waterfall,
        verdict(explained, findings(asked), _utilization(asked), _narrow(asked), _NAMED),
        explained.operations,
        tuple(_steps(run)),
        tuple(sources),
        floor.peaks,
    )


def _narrow(asked: TrainingRuleInput) -> Iterator[Remedy]:
    """Products in 8 bits, where the run could have them: they change its numbers."""
    what, shape = asked.run.what, asked.floor.shape
    if what.kind == "cuda" and shape.precision == "bf16" and shape.runs_graph:
        narrow = replace(shape, precision="fp8-tensor")
        option = "--run.precision fp8-tensor"
        yield from asked.tried("products in 8 bits, if the loss allows it", option, narrow)


def _utilization(asked: TrainingRuleInput) -> tuple[str, ...]:
    run, floor, whole = asked.run, asked.floor, asked.run.whole
    promised = floor.device.known("compute", "bfloat16", measured=False) if run.what.kind == "cuda" else None
    peak = floor.peaks.compute if promised is None else promised.value
    of = "the rate that this processor reaches" if promised is None else "the maker's peak, MFU"
    used = whole.flops.total / whole.seconds / (peak * run.what.layout.ranks)
    return (
        f"{whole.tokens / whole.seconds:,.0f} tokens/s, {used:.1%} of {of}; packs are {run.filled:.0%} full",
        f"a step takes {seconds(whole.each)}, its floor is {seconds(floor.seconds / whole.steps)}",
    )


def _steps(run: RecordedRun) -> Iterator[StepTime]:
    """Steps of an interval are taken to be alike."""
    begin = 0.0
    for one in run.intervals:
        count = one.steps if run.whole.steps <= _MAX_STEPS else 1
        each, work = one.seconds / count, min(one.device, one.seconds) / count
        for number in range(count):
            start = begin + number * each
            yield StepTime(start, start + work, None, one.tokens // one.steps, one.sequences // one.steps)
        begin += one.seconds
