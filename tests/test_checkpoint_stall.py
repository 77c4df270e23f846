"""The benchmark of checkpoints: every line that it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from strata.train.checkpoints.folder import check_files

ROOT = Path(__file__).parent.parent


def test_two_checkpoints_are_written_beside_steps_and_the_last_is_read(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint_stall.py", str(tmp_path), "--gib", "0.02"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    prepared, first, second, restored = map(json.loads, done.stdout.splitlines())
    assert [prepared["ranks"], first["checkpoint"], second["checkpoint"]] == [1, 1, 2]
    for line in (first, second):
        assert line["steps"] >= 1
        assert line["start_s"] + line["longest_poll_s"] <= line["stalled_s"] + 1e-3
        assert line["stalled_share"] < 1
    assert restored["restore_s"] > 0
    (kept,) = tmp_path.glob("step-*")
    assert kept.name == "step-00000002"
    check_files(kept)
