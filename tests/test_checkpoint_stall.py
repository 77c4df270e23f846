"""The benchmark of checkpoints: every line that it prints, what it leaves behind, and how it ends when one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint_stall
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.folder import check_files

ROOT = Path(__file__).parent.parent


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/checkpoint_stall.py", str(folder), "--gib", "0.02"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_two_checkpoints_are_written_beside_steps_and_the_last_is_read(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    prepared, first, second, restored = map(json.loads, done.stdout.splitlines())
    assert "prepare_s" in prepared
    assert [prepared["ranks"], first["checkpoint"], second["checkpoint"]] == [1, 1, 2]
    assert "restore_s" in restored
    (kept,) = tmp_path.glob("step-*")
    assert kept.name == "step-00000002"
    check_files(kept)


def test_a_checkpoint_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.part").touch()  # where the folder of the first would be
    done = run(tmp_path)
    assert done.returncode != 0
    assert "the checkpoint of step 1 was not written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [list(json.loads(line)) for line in done.stdout.splitlines()] == [["ranks", "gib", "prepare_s"]]


def test_values_other_than_those_at_the_start_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointer, "restore", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["checkpoint_stall.py", str(tmp_path), "--gib", "0.01"])
    with pytest.raises(SystemExit, match="master of weight0, as rank 0 has read it, is not what step"):
        checkpoint_stall.main()
