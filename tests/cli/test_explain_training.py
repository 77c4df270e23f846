"""`strata explain --run`: real runs on a CPU, finished ones by their folder, others by a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.comm.launch import join_world
from strata.hardware.machine import cpu_name, processor
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.report import ProbeReport, file_of, keep
from strata.plan.explain.explanation import Explanation
from strata.plan.training_explain import explain_run
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.train.config import read_train_config
from strata.train.profile import StepProfiler
from strata.train.trainer import Trainer
from tests.train.tiny_run import Files, write_files, write_toml

RUNNER = CliRunner()
explain = explain_run.explain_run
STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of this machine that was kept, of 10 GB/s and 100 GFLOP/s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ceilings = (Ceiling("copy", 1e10, 0.1, shape=(10**9,)), Ceiling("product", 1e11, 0.01, "float32", (512,) * 3))
    report = ProbeReport(cpu_name(), "2026-11-23", 1.0, processor(), (), ceilings)
    keep(report, file_of(cpu_name(), 1))


@pytest.fixture
def toml(files: Files, tmp_path: Path) -> Path:
    return write_toml(tmp_path / "run.toml", files.table(tmp_path / "run", run={"steps": STEPS, "log_every": 2}))


def explained(*arguments: str) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["explain", "--run", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    fall = found["waterfall"]
    parts = sum(part["seconds"] for part in fall["parts"])
    assert parts + fall["floor"] == pytest.approx(fall["measured"], rel=0.02)
    assert found["device"] == cpu_name()
    assert found["verdict"]["evidence"]
    return found


def test_a_run_is_explained_from_its_folder(toml: Path, tmp_path: Path) -> None:
    with join_world("cpu") as world:
        profiler = StepProfiler(tmp_path / "run" / "profile", range(5, 6), world.device)
        position = Trainer(read_train_config(toml), world, profiler=profiler).train()
    page, trace = tmp_path / "run.html", tmp_path / "run.json"
    found = explained(str(tmp_path / "run"), "--html", str(page), "--trace", str(trace))
    lines = [json.loads(line) for line in (tmp_path / "run" / "times.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4, 6]  # the checkpoint's step has a line, too
    assert sum(line["tokens"] for line in lines) == position.tokens
    for line in lines:
        assert sum(line["phases"].values()) == pytest.approx(line["seconds"], rel=1e-3)
        assert 0 < line["device"] < line["seconds"]
    # What the profiler took is not the run's.
    took = [line["phases"].get("profile", 0.0) for line in lines]
    assert took[-1] > 1e-3
    assert found["waterfall"]["measured"] == pytest.approx(sum(line["seconds"] for line in lines) - sum(took))
    flops = sum(line[name] for line in lines for name in ("products", "attention", "head"))
    assert found["waterfall"]["floor"] == pytest.approx(flops / 1e11)  # its update fits into caches
    assert len(found["steps"]) == STEPS
    assert {part["name"] for part in found["waterfall"]["parts"]} >= {"checkpoints", "update over its floor"}
    assert found["verdict"]["symptom"] in page.read_text()
    slices = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("cat") == "step"]
    assert len(slices) == STEPS


def test_a_config_is_explained_by_a_few_steps_that_leave_nothing(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    runs: list[RecordedRun] = []

    def noted(run: RecordedRun) -> Explanation:
        runs.append(run)
        return explain(run)

    monkeypatch.setattr(explain_run, "explain_run", noted)
    found = explained(str(toml))
    # What is advised goes by the config as it is, not as it was for the short run.
    assert runs[0].what.config == read_train_config(toml)
    assert len(found["steps"]) == runs[0].whole.steps == 6
    assert {"products", "attention", "optimizer"} <= {one["name"] for one in found["operations"]}
    assert any("traced steps" in source for source in found["sources"])
    assert sorted(tmp_path.iterdir()) == before
