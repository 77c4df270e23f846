"""OpenAI's JavaScript client: every endpoint and field, streamed and not (npm/suite.mjs)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import KEY
from tests.serve.running import Running

SUITE = Path(__file__).parent / "npm" / "suite.mjs"
NODE = shutil.which("node")
INSTALLED = SUITE.parent / "node_modules" / "openai" / "package.json"

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(not INSTALLED.exists(), reason="OpenAI's npm client is not installed: make clients"),
]


def test_every_endpoint_and_field(server: Running) -> None:
    assert NODE is not None
    result = subprocess.run(
        [NODE, "--test-reporter=tap", SUITE],
        env={**os.environ, "STRATA_URL": server.url, "STRATA_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    wanted = len(re.findall(r"^ *test\(", SUITE.read_text(), re.MULTILINE)) + 1  # one of them is for two choices
    assert f"# pass {wanted}\n" in result.stdout, result.stdout
