"""Other people's clients as their users run them: turns that go back as they came, tool round trips, structured output.

Each is a program of its own in loops/ (npm/ for the one in JavaScript), which asks a model of a few rules
(model_with_tools.py) and ends with an error if an answer is not what it should be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.clients.model_with_tools import rule_server

HERE = Path(__file__).parent
INSTALLED = HERE / "frameworks"
NODE = shutil.which("node")
AI = HERE / "npm" / "node_modules" / "ai" / "package.json"
# Nothing is fetched and nothing told to anybody.
ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with rule_server() as url:
        yield url


def run(command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
    result = subprocess.run(
        command, env={**os.environ, **ALONE, **environment}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not INSTALLED.exists(), reason="the clients of others are not installed: make clients")
@pytest.mark.parametrize("client", ["litellm", "langchain", "instructor", "pydantic_ai", "agents"])
def test_of_python(client: str, url: str) -> None:
    run([sys.executable, HERE / "loops" / f"{client}_loop.py", url], {"PYTHONPATH": str(INSTALLED)})


@pytest.mark.skipif(NODE is None or not AI.exists(), reason="node or the AI SDK is not installed: make clients")
def test_of_javascript(url: str) -> None:
    assert NODE is not None
    run([NODE, HERE / "npm" / "ai_loop.mjs", url], {})
