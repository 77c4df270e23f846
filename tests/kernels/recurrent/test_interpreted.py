"""The Triton kernels compute what their references do, in float32 in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("module", ["interpreted", "interpreted_chunks"])
def test_kernels_equal_their_references(module: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.kernels.recurrent.{module}"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    allowed = {name: 2e-3 if "float16" in name else 2e-4 for name in found}
    assert {name: error for name, error in found.items() if not error <= allowed[name]} == {}  # nor NaN
