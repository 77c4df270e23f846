"""Checkouts in turns: what each call took, the best of each, and what a failure says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def in_turns(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/in_turns.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_two_checkouts_run_in_turns(tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(ROOT)
    run = in_turns(
        "strata/models/builtin", "T3-b1", f"before={tmp_path}/other", "after=.", "--turns", "1", "--calls", "1"
    )
    assert run.returncode == 0, run.stderr
    *lines, best = map(json.loads, run.stdout.splitlines())
    assert [line["checkout"] for line in lines] == ["before", "after"]
    assert best["best"] == {line["checkout"]: line["value"] for line in lines}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("builtin", "T9", "a=."), "test 'T9' is unknown"),
        (("no/such/folder", "T2", "a=."), "'no/such/folder' does not exist"),
        (("builtin", "T2", "a=/"), "a=/ is no checkout of Strata"),
        (("builtin", "T2", "."), ". is no checkout of Strata; give NAME=FOLDER"),
    ],
)
def test_what_is_wrong_is_told_without_a_traceback(options: tuple[str, ...], said: str) -> None:
    run = in_turns(*options)
    assert run.returncode != 0
    assert said in run.stderr
    assert "Traceback" not in run.stderr
