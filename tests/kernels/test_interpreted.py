"""The Triton kernels compute what their references do, in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "pytest", f"--confcutdir={HERE}"]
# A start takes a second less without these.
COMMAND += [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "schemathesis")]


@pytest.mark.parametrize("file", sorted(HERE.glob("*/interpreted.py")), ids=lambda path: path.parent.name)
def test_kernels_equal_their_references(file: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*COMMAND, file], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
