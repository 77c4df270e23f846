"""An explanation as a Chrome trace, for Perfetto: https://ui.perfetto.dev.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from strata.plan.explain.explanation import Explanation, OperationTime, Phase, StepTime
from strata.plan.report.timeline import kind_of

PHASES, STEPS, GAPS = "phases of the request", "steps", "gaps between steps"
SUMS = "operations, all calls added up"
KV = "share of the KV memory in use"
# Microseconds of a second, in which the format counts. Shorter gaps are rounding.
_MICRO = 1e6
_SHORTEST_GAP = 1e-7

Event = dict[str, Any]


def chrome_trace(explanation: Explanation) -> Event:
    """The trace as JSON has it: a process for the run, with steps, the gaps between them and operations on tracks, and
    counters of sequences, tokens and KV memory; or for one request, with its phases.

    Operations stand one after another, all calls of each added up, which shows shares and no order.
    """
    steps = explanation.steps
    tracks: dict[str, list[Event]] = {
        PHASES: [_of_phase(phase) for phase in explanation.phases],
        STEPS: [_of_step(number, step) for number, step in enumerate(steps)],
        GAPS: list(_gaps(steps)),
        SUMS: list(_sums(explanation.operations)),
    }
    events = [_named("process_name", explanation.title)]
    for thread, (name, found) in enumerate(((name, found) for name, found in tracks.items() if found), 1):
        events.append(_named("thread_name", name) | {"tid": thread})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": thread, "args": {"sort_index": thread}})
        events += [event | {"pid": 1, "tid": thread} for event in found]
    events += _counters(steps)
    verdict = explanation.verdict.line
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": explanation.title, "device": explanation.device, "verdict": verdict},
    }


def write_trace(path: Path, trace: Event) -> None:
    """Write it, gzipped where the name ends in .gz, which Perfetto reads too."""
    data = json.dumps(trace, allow_nan=False).encode()
    path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)


def _named(kind: str, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": 1, "tid": 0, "args": {"name": name}}


def _complete(name: str, begin: float, end: float, category: str, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin * _MICRO,
        "dur": max(0.0, end - begin) * _MICRO,
        "args": args,
    }


def _of_step(number: int, step: StepTime) -> Event:
    told = {"step": number, "tokens": step.tokens, "sequences": step.sequences}
    return _complete(kind_of(step), step.begin, step.end, "step", **told)


def _of_phase(phase: Phase) -> Event:
    told = {f"{name} ms": seconds * 1e3 for name, seconds in phase.parts.items()}
    return _complete(phase.name, phase.begin, phase.end, "phase", **told)


def _gaps(steps: Sequence[StepTime]) -> Iterator[Event]:
    """The device has ended all steps before and waits for the next one."""
    ends = accumulate((step.end for step in steps), max)
    for end, after in zip(ends, steps[1:], strict=False):
        if after.begin - end > _SHORTEST_GAP:
            yield _complete("gap", end, after.begin, "gap")


def _sums(operations: Sequence[OperationTime]) -> Iterator[Event]:
    begin = 0.0
    for one in operations:
        told = {"floor ms": one.floor * 1e3, "FLOPs": one.flops, "bytes": one.bytes, "bound": one.bound}
        yield _complete(one.name, begin, begin + one.seconds, "operation", **told)
        begin += one.seconds


def _counters(steps: Sequence[StepTime]) -> Iterator[Event]:
    """What steps hold over time, such as the share of the KV memory in use."""
    for name, field in (("sequences", "sequences"), ("tokens", "tokens"), (KV, "kv")):
        points = [(step.begin, float(getattr(step, field) or 0.0)) for step in steps]
        if any(value for _, value in points):
            for at, value in (*points, (max(step.end for step in steps), 0.0)):
                yield {"ph": "C", "name": name, "pid": 1, "tid": 0, "ts": at * _MICRO, "args": {name: value}}
