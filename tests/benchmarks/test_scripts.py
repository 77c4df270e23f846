"""Every script of `benchmarks/` finds what it imports; the pictures are drawn from the lines that they are of."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.plot_serve import newest_sweep

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(str(path.relative_to(BENCHMARKS).with_suffix("")) for path in BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_finds_what_it_imports(script: str) -> None:
    if script == "sanitize" and find_spec("triton") is None:
        pytest.skip("runs Triton's kernels")
    importlib.import_module(f"benchmarks.{script.replace('/', '.')}")


@pytest.mark.parametrize("script", ["plot_gaps", "plot_serve"])
def test_asking_for_help_draws_nothing(script: str) -> None:
    pictures = sorted((BENCHMARKS.parent / "docs").glob("*.svg"))
    before = [picture.read_bytes() for picture in pictures]
    command = [sys.executable, "-m", f"benchmarks.{script}", "--help"]
    run = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage:")
    assert [picture.read_bytes() for picture in pictures] == before


def test_a_sweep_is_of_shares_of_a_measured_saturation(tmp_path: Path) -> None:
    """Loads at rates of their own are other measurements, however new they are."""
    lines = [
        {"started": "1", "request_rate": 40.0, "saturation": 160.0},
        {"started": "2", "request_rate": "inf", "saturation": 200.0},
        {"started": "2", "request_rate": 50.0, "saturation": 200.0},
        {"started": "2", "request_rate": 100.0, "saturation": 200.0},
        {"started": "3", "request_rate": 55.0, "saturation": None},
        {"started": "4", "request_rate": "inf", "saturation": None},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert newest_sweep(path) == lines[1:4]


def test_results_without_a_sweep_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"started": "1", "request_rate": 55.0, "saturation": None}) + "\n")
    with pytest.raises(ValueError, match="no sweep"):
        newest_sweep(path)
