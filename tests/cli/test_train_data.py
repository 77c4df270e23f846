"""`strata data` as it is typed, with Ctrl-C; what a terminal shows of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strata.cli.train import Pace, TerminalScreen

ROOT = Path(__file__).parents[2]


def test_interrupted_it_ends_with_all_its_processes(tmp_path: Path) -> None:
    """The signal goes to all processes of the group, as from a terminal."""
    (tmp_path / "a.txt").write_text("Some words of a text that goes on and on.\n" * 250_000)
    words = "-m strata.cli.main data a.txt --out out --longest 64 --workers 2"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    settings: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen([sys.executable, *words.split()], cwd=tmp_path, env=environment, **settings)
    try:
        while not (tmp_path / "out/plan.json").exists() and started.poll() is None:
            time.sleep(0.01)
        time.sleep(1)
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=30)
        assert started.returncode == 130
        assert "Traceback" not in errors
        assert not (tmp_path / "out/index.json").exists()
        deadline = time.monotonic() + 30
        while _group_lives(started.pid):
            assert time.monotonic() < deadline, "a process has outlived the command"
            time.sleep(0.05)
    finally:
        if _group_lives(started.pid):
            os.killpg(started.pid, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_that_is_left_follows_from_the_last_lines() -> None:
    clock = Clock()
    place = Pace(0, 40, clock)
    clock.now += 60.0  # the first steps are slow
    assert place.at(5) == "step 5 of 40, 7 min left"
    for step in range(10, 40, 5):
        clock.now += 2.0
        assert place.at(step).startswith(f"step {step} of 40, ")
    place = Pace(1000, 1100, clock)
    for step in range(1010, 1100, 10):
        clock.now += 5.0
        described = place.at(step)
    assert described == "step 1090 of 1100, 5 s left"
    assert place.at(1100) == "step 1100 of 1100"


def test_long_runs_and_steps_that_are_taken_back() -> None:
    clock = Clock()
    place = Pace(100, 100_000, clock)
    clock.now += 60.0
    assert place.at(200) == "step 200 of 100000, 16 h 38 min left"
    assert place.at(50) == "step 50 of 100000"


@pytest.mark.parametrize("in_terminal", [True, False])
def test_a_terminal_shows_it_in_place(
    in_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if in_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "160")
    with TerminalScreen().progress(0, 2) as report:
        report({"step": 1, "loss": 2.0, "validation_loss": 2.5, "unknown": 3})
        report({"step": 2, "loss": 1.0})
    said = capsys.readouterr().err
    assert "step 2 of 2" in said
    assert ("\x1b[2K" in said) == in_terminal, "the line is written over"
    if not in_terminal:
        first, last = said.splitlines()
        assert first.startswith("step 1 of 2, ")
        assert first.endswith(" left  loss 2.0000  validation_loss 2.5000")
        assert last == "step 2 of 2  loss 1.0000"
