"""Traces of explanations, checked against the format's documentation, and by their figures."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import pytest

from strata.plan.explain.explanation import Phase
from strata.plan.report.trace import GAPS, KV, STEPS, SUMS, chrome_trace, write_trace
from tests.plan.report.sample import sample

# Of the Trace Event Format: the phases that are used here, and which fields each must have.
PHASES = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name": {"name": str}, "thread_name": {"name": str}, "thread_sort_index": {"sort_index": int}}
# Of the object format: all else is metadata, which viewers may ignore.
UNITS = {"ms", "ns"}


def check(trace: dict[str, Any]) -> None:
    """Everything that the document demands of a trace in JSON object format with these phases."""
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in UNITS
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event.keys() >= PHASES[event["ph"]], event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            for key, kind in METADATA[event["name"]].items():
                assert isinstance(event["args"][key], kind)
        else:
            assert isinstance(event["ts"], Real)
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, Real) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            # "Complete" events of a thread must nest: none may begin in another and end after it.
            still = ends[event["pid"], event["tid"]]
            while still and still[-1] <= event["ts"] + 1e-6:
                still.pop()
            end = event["ts"] + event["dur"]
            assert not still or end <= still[-1] + 1e-6, event
            still.append(end)


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Slices by the name of their track."""
    names = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_steps_gaps_and_operations_are_slices() -> None:
    value = sample()
    trace = json.loads(json.dumps(chrome_trace(value)))
    check(trace)
    found = tracks(trace)
    assert list(found) == [STEPS, GAPS, SUMS]
    assert [one["name"] for one in found[STEPS]] == [step.kind for step in value.steps]
    assert found[STEPS][1]["ts"] == pytest.approx(0.033 * 1e6)
    assert found[STEPS][1]["args"] == {"step": 1, "tokens": 32, "sequences": 8}
    # The steps and the gaps between them are all the time from the first to the last.
    covered = sum(one["dur"] for one in found[STEPS] + found[GAPS])
    assert covered == pytest.approx(1e6 * (value.steps[-1].end - value.steps[0].begin))
    assert sum(one["dur"] for one in found[SUMS]) == pytest.approx(1e6 * sum(one.seconds for one in value.operations))
    assert found[SUMS][0]["args"]["bound"] == "memory"


def test_phases_of_a_request_are_slices() -> None:
    phases = (Phase("queue", 0.0, 0.25, {"slot": 0.25}), Phase("decode", 0.25, 1.0, {"decode": 0.5, "masks": 0.25}))
    trace = json.loads(json.dumps(chrome_trace(replace(sample(), operations=(), steps=(), phases=phases))))
    check(trace)
    (found,) = tracks(trace).values()
    assert list(tracks(trace)) == ["phases of the request"]
    assert [(one["name"], one["ts"], one["dur"]) for one in found] == [("queue", 0.0, 25e4), ("decode", 25e4, 75e4)]
    assert found[1]["args"] == {"decode ms": 500.0, "masks ms": 250.0}


def test_counters_follow_the_steps() -> None:
    value = sample()
    shares = [one["args"][KV] for one in chrome_trace(value)["traceEvents"] if one["ph"] == "C" and one["name"] == KV]
    assert shares == [*(step.kv for step in value.steps), 0.0]
    events = [one for one in chrome_trace(value)["traceEvents"] if one["ph"] == "C" and one["name"] == "sequences"]
    assert [one["args"]["sequences"] for one in events] == [*(float(step.sequences) for step in value.steps), 0.0]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_files_hold_what_was_made(name: str, tmp_path: Path) -> None:
    trace = chrome_trace(sample())
    write_trace(tmp_path / name, trace)
    data = (tmp_path / name).read_bytes()
    assert json.loads(gzip.decompress(data) if name.endswith(".gz") else data) == json.loads(json.dumps(trace))


def test_an_explanation_without_steps_has_a_trace() -> None:
    trace = chrome_trace(replace(sample(), steps=(), operations=()))
    check(trace)
    assert tracks(trace) == {}
