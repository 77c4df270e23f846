"""The suite of OpenAI's Python client once more, with version 2 of it, which many still have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALLED = ROOT / "tests" / "clients" / "openai2"
SUITE = ("tests/serve/api/test_openai_client.py", "tests/serve/api/test_structured_requests.py")


@pytest.mark.skipif(not INSTALLED.exists(), reason="version 2 of OpenAI's client is not installed: make clients")
def test_the_suite_passes_with_version_2() -> None:
    environment = {**os.environ, "PYTHONPATH": str(INSTALLED)}
    version = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    assert subprocess.run(version, env=environment, capture_output=True, text=True).stdout.startswith("2.")
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE]
    result = subprocess.run(suite, env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
