"""Engines of which nothing is real but that they are processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fake_engine.py")


class FakeEngines:
    """options: that name their Pythons, as a comparison takes them."""

    def __init__(self, folder: Path, failures: dict[str, str]) -> None:
        self._calls = folder / "calls.jsonl"
        self.options: list[str] = []
        for engine in ("strata", "vllm"):
            file = folder / f"{engine}-python"
            call = [sys.executable, "-S", str(PROGRAM), engine, failures.get(engine, ""), str(self._calls)]
            file.write_text(f'#!/bin/sh\nexec {" ".join(map(repr, call))} "$@"\n')
            file.chmod(0o755)
            self.options += [f"--{engine}-python", str(file)]

    def calls(self) -> list[dict[str, Any]]:
        if not self._calls.exists():
            return []
        return [json.loads(line) for line in self._calls.read_text().splitlines()]

    def servers(self) -> list[dict[str, Any]]:
        return [call for call in self.calls() if call["options"][0] == "serve"]

    def alive(self) -> list[int]:
        """The servers, and processes that they started, that still run."""
        started = [pid for call in self.servers() for pid in (call["pid"], call["helper"])]
        return [pid for pid in started if runs(pid)]


MakeEngines = Callable[..., FakeEngines]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended (one that nobody has collected has)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for(true: Callable[[], Any], seconds: float = 180.0) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.fixture
def engines(tmp_path: Path) -> MakeEngines:
    """Makes both engines; failures: how one's server fails, by its name."""

    def make(**failures: str) -> FakeEngines:
        return FakeEngines(tmp_path, failures)

    return make
