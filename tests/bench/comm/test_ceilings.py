"""Collectives as ceilings: what `strata bench comm` prints for groups of GPUs, and what to say when it does not."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest

from strata.bench.comm.measure import group_sizes, probe_items
from strata.hardware.probe.ceiling import Ceiling, Measured

LINE = {"operation": "all_reduce", "algorithm": "one shot", "bytes": 8192, "value": 3.5}


def measured(monkeypatch: pytest.MonkeyPatch, answer: Any, seconds: float = 60.0) -> tuple[Measured, list[list[str]]]:
    commands: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> Any:
        commands.append(command)
        assert 0 < settings["timeout"] <= seconds
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    found, end = Measured(), time.perf_counter() + seconds
    found.run(probe_items(4, end), end)
    return found, commands


def test_all_gpus_and_then_halves() -> None:
    assert [group_sizes(gpus) for gpus in (2, 3, 6, 8)] == [[2], [3], [6, 3], [8, 4, 2]]


def test_lines_become_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    found, commands = measured(monkeypatch, subprocess.CompletedProcess([], 0, json.dumps(LINE) + "\n", ""))
    assert found.missing == {}
    assert found.ceilings == [
        Ceiling("all_reduce", 3.5e-6, 3.5e-6, "bfloat16", (8192,), ranks, "one shot") for ranks in (4, 2)
    ]
    assert [command[command.index("--ranks") + 1] for command in commands] == ["4", "2"]


@pytest.mark.parametrize(
    ("answer", "seconds", "reason"),
    [
        (
            subprocess.CompletedProcess([], 1, "", "a\nstrata: error: no NCCL\n"),
            60,
            "RuntimeError: strata: error: no NCCL",
        ),
        (subprocess.TimeoutExpired([], 1), 60, "not done within the 60 s that were left"),
        (None, 5, "5 s are left, and ranks need 12 s to start"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, answer: Any, seconds: float, reason: str) -> None:
    found, _ = measured(monkeypatch, answer, seconds)
    assert found.ceilings == []
    assert reason in found.missing["collectives over 4"]
