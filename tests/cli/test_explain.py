"""`strata explain` on the built-in model: what it prints adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.explain_output import trace_name
from strata.cli.main import app

RUNNER = CliRunner()
SMALL = ["explain", "T3-b2", "--device", "cpu", "--prompt", "20", "--output", "4"]


def test_the_parts_and_the_floor_are_the_measured_time(tmp_path: Path) -> None:
    page, trace = tmp_path / "run.html", tmp_path / "run.json"
    result = RUNNER.invoke(app, [*SMALL, "--json", "--html", str(page), "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    fall = found["waterfall"]
    parts = sum(part["seconds"] for part in fall["parts"])
    assert parts + fall["floor"] == pytest.approx(fall["measured"], rel=0.02)
    assert {step["kind"] for step in found["steps"]} == {"prompt", "decode"}
    assert sum(step["tokens"] for step in found["steps"]) == 2 * (20 + 4 - 1)  # the last id of each is never run
    operations = {one["name"] for one in found["operations"]}
    assert {"linear", "attention", "add_rms_norm"} <= operations
    assert found["verdict"]["symptom"] in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["T9"], "test 'T9' is unknown; give T1, T2, T3-bN (N requests, such as T3-b32), T4, or T5, a served load"),
        (["T1", "--device", "cpu", "--profile"], "--profile is of CUDA, and this runs on a CPU"),
        (["T1", "--trace", "x.txt"], "--trace x.txt: give a name that ends in .json or .json.gz"),
        (["T3-b1000000000000"], "give T3-bN with N up to 10000"),
        (["T1", "--prompt", "5"], "--prompt and --output are of T3-bN"),
        (["T3-b2", "--prompt", "1000000"], "T3-b2 has sequences of up to 1,000,256 tokens and builtin reads"),
        (["T5", "--prompt", "1000000", "--num-prompts", "10000"], "T5 has sequences of up to 1,000,128 tokens"),
        (["T4", "--device", "cpu"], "sequences of up to 2,049 tokens and builtin reads 1,024"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["explain", *arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_ranks_on_one_processor_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.bench.run.engine", lambda *_: pytest.fail("an engine was started"))
    result = RUNNER.invoke(app, [*SMALL, "--tensor-parallel-size", "2"])
    assert "several ranks on one processor" in str(result.exception)


def test_a_trace_of_another_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("x.txt", "x.gz", "json"):
        RUNNER.invoke(app, [*SMALL, "--trace", str(tmp_path / name)])
    assert not list(tmp_path.iterdir())
    assert trace_name(tmp_path / "x.json.gz") == tmp_path / "x.json.gz"


@pytest.mark.parametrize("option", ["--prompt", "--output", "--num-prompts"])
def test_sizes_that_no_memory_holds_are_refused(option: str) -> None:
    result = RUNNER.invoke(app, ["explain", "T5", option, str(10**12)])
    assert result.exit_code == 2
    assert option in result.output
