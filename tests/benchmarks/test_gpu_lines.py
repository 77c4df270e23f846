"""What programs that measure on a GPU print: lines with their origin, or why there are none."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_lines import GpuLines, gpu_arguments


def test_without_a_gpu_the_program_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["products"])
    with pytest.raises(SystemExit) as ended:
        gpu_arguments(argparse.ArgumentParser("products"))
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("products: error: needs a CUDA device, and torch sees none\n")


def test_lines_say_where_they_are_from_and_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    save = tmp_path / "lines.jsonl"
    save.write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["products.py", "--rows", "1, 2", "--save", str(save)])
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.products", asked.save, scheme="fp8")
    for rows in asked.rows.split(","):
        lines.put({"rows": int(rows)})
    kept = [json.loads(line) for line in save.read_text().splitlines()[1:]]
    assert kept == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rows"] for line in kept] == [1, 2]
    for line in kept:
        assert (line["device"], line["scheme"]) == ("a device", "fp8")
        assert line["command"] == f"python -m benchmarks.products --rows '1, 2' --save {save}"
        assert {"commit", "date", "torch", "triton"} <= line.keys()
