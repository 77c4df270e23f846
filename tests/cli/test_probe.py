"""`strata probe` on a CPU: a table, JSON, the file in the user's cache, and bad input in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from strata.cli.probe import probe
from strata.hardware.probe import report, run
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.cpu import CpuSizes, probe_items
from strata.hardware.probe.report import kept
from tests.hardware.probe.test_device import REPORT

SMALL = CpuSizes(copied=1 << 20, squares=(32,), rows=(1,), width=64, attended=32, call=0.01, held=0.05)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(run.cpu, "probe_items", partial(probe_items, sizes=SMALL))
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


def test_a_table_is_whole_on_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the largest operands, the longest names and a device whose figures are promised."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report, "keep", lambda *_: None)
    found = (
        Ceiling("copy", 4.2e12, 1e-3, shape=(1 << 30,)),
        Ceiling("product", 12.34e12, 1e-3, "bfloat16", (4096, 28672, 4096)),
        Ceiling("product, sustained", 701.5e12, 1e-3, "bfloat16", (8192,) * 3, 128),
        Ceiling("attention", 600.4e12, 1e-3, "bfloat16", (16, 32, 1024, 128), algorithm="cudnn_attention"),
        Ceiling("host to device", 52e9, 1e-3, shape=(256 << 20,)),
        Ceiling("kernel in a graph", 1.234e-6, 1.234e-6),
        Ceiling("reduce_scatter", 123.4e-6, 1e-3, "bfloat16", (128 << 20,), 8, "one shot and norm"),
    )
    monkeypatch.setattr(run, "probe", lambda *_: replace(REPORT, ceilings=found))
    probe("cpu", 60, as_json=False)
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # behind them the path of the file
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert rows[1:-3] == [
        "what dtype shape by reached promised unit share",
        "copy - 1 GiB 1 4.2 4.8 TB/s 88%",
        "product bfloat16 4096x28672x4096 1 12.34 989.4 TFLOP/s 1%",
        "product, sustained bfloat16 8192x8192x8192 128 701.5 989.4 TFLOP/s 71%",
        "attention bfloat16 16x32x1024x128 cudnn 600.4 989.4 TFLOP/s 61%",
        "host to device - 256 MiB 1 52 64 GB/s 81%",
        "what size by us",
        "kernel in a graph 1 1.234",
        "reduce_scatter 128 MiB 8 one shot and norm 123.4",
    ]


def test_a_cache_that_takes_no_files_is_a_warning(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.parent.write_text("a file where the folder should be")
    probe("cpu", 60, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ceilings"]
    assert captured.err.startswith("strata: warning: not kept: ")


def test_a_short_probe_does_not_replace_a_longer_one(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it had no time for would be lost; without an earlier one, it is kept."""
    monkeypatch.setattr(run, "probe", lambda *_: short)
    whole = (Ceiling("copy", 1e10, 1.0, shape=(9,)), Ceiling("product", 1e11, 1.0, "bfloat16", (9, 9, 9)))
    short = replace(REPORT, gpus=(), ceilings=whole[:1], missing={"products in bfloat16": "the time was over"})
    probe("cpu", 1, as_json=False)
    (file,) = small.iterdir()
    assert kept(file) == short
    longer = replace(REPORT, gpus=(), ceilings=whole, missing={})
    report.keep(longer, file)
    capsys.readouterr()
    probe("cpu", 1, as_json=False)
    captured = capsys.readouterr()
    assert kept(file) == longer
    assert captured.err == (
        f"strata: warning: not kept: {file} has product in bfloat16 too; give more --seconds, or remove it\n"
    )
    assert "kept in" not in captured.out
    file.write_text("{")
    probe("cpu", 1, as_json=False)
    assert kept(file) == short


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="'tpu' is unknown; give auto, cpu or cuda"):
        probe("tpu", 60, as_json=False)
