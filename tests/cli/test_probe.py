"""`strata probe` on a CPU: a table, JSON, the file in the user's cache, and bad input in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from strata.cli.probe import probe
from strata.hardware.probe import run
from strata.hardware.probe.cpu import CpuSizes, parts
from strata.hardware.probe.report import kept

SMALL = CpuSizes(copied=1 << 20, squares=(32,), rows=(1,), width=64, attended=32, call=0.01, held=0.05)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(run.cpu, "parts", partial(parts, sizes=SMALL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "strata" / "probe"


def test_json_is_what_is_kept(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe("cpu", 60, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    (file,) = small.iterdir()
    assert json.loads(file.read_text()) == printed
    assert kept(file).product == printed["product"]
    assert {one["quantity"] for one in printed["ceilings"]} >= {"copy", "read", "product", "attention"}
    assert printed["gpus"] == []


def test_a_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe("cpu", 60, as_json=False)
    printed = capsys.readouterr().out
    assert "32x32x32" in printed
    assert "FLOP/s" in printed
    assert "kept in" in printed


def test_a_cache_that_takes_no_files_is_a_warning(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.parent.write_text("a file where the folder should be")
    probe("cpu", 60, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ceilings"]
    assert captured.err.startswith("strata: warning: not kept: ")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="'tpu' is unknown; give auto, cpu or cuda"):
        probe("tpu", 60, as_json=False)
