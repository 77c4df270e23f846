"""Threads that wait: what a command's environment says of them, and that it says so in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from strata.cli import main
from strata.cli.main import set_waiting

BRIEFLY, AT_ONCE = {"GOMP_SPINCOUNT": "10000"}, {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate", BRIEFLY),
        ("serve", BRIEFLY),
        ("", BRIEFLY),
        ("explain T1", BRIEFLY),
        ("train run.toml", AT_ONCE),
        ("explain --run run.toml", AT_ONCE),
        ("explain --run=run.toml", AT_ONCE),
    ],
)
def test_threads_spin_briefly_and_those_of_training_not_at_all(arguments: str, said: dict[str, str]) -> None:
    found: dict[str, str] = {}
    set_waiting(arguments.split(), found)
    assert found == said


def test_what_a_user_says_of_them_stands() -> None:
    for chosen in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}):
        found = dict(chosen)
        set_waiting(["serve"], found)
        assert found == chosen


def test_it_is_said_before_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str] | None] = []
    monkeypatch.setattr(sys, "argv", ["strata", "train", "run.toml"])
    monkeypatch.setattr(main, "set_waiting", seen.append)
    monkeypatch.setattr(main, "app", lambda: seen.append(None))
    main.main()
    assert seen == [["train", "run.toml"], None]


@pytest.mark.parametrize("arguments", [["train", "nowhere.toml"], ["explain", "--run", "nowhere.toml"]])
def test_commands_leave_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the process starts later would be told what a command sets."""
    for name in AT_ONCE | BRIEFLY:
        monkeypatch.delenv(name, raising=False)
    assert CliRunner().invoke(main.app, arguments).exit_code != 0
    assert not os.environ.keys() & (AT_ONCE | BRIEFLY)


def test_torch_is_not_loaded_before() -> None:
    code = "import sys, strata.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
