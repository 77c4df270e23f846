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
    assert trace_name(tmp_path / "x.json.gz") == tmp_path / "x.json.gz"


@pytest.mark.parametrize("option", ["--prompt", "--output", "--num-prompts"])
def test_sizes_that_no_memory_holds_are_refused(option: str) -> None:
    result = RUNNER.invoke(app, ["explain", "T5", option, str(10**12)])
    assert result.exit_code == 2
    assert option in result.output
