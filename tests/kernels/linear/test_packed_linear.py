"""Products by packed weights on CUDA: the kernels in Triton's interpreter, and which of them serve which call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_kernels_equal_their_references() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.linear.interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "equal\n"
