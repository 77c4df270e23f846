"""Tests that run a module of their own on several GPUs, a process each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def require_gpus(ranks: int) -> None:
    """Skips the test where GPUs are missing."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


def found_by_ranks(module: str, ranks: int, folder: Path, timeout: float) -> list[Any]:
    """What each rank of `python -m module FOLDER` writes to RANK.json there. Skips the test where GPUs are missing."""
    require_gpus(ranks)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*launch, "-m", module, str(folder)], check=True, timeout=timeout)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
