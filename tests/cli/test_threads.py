"""Threads that wait: what a command's environment says of them, and that it says so in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from strata.cli import main
from strata.cli.threads import spin_briefly


def test_threads_spin_briefly_unless_their_user_says_otherwise() -> None:
    found: dict[str, str] = {}
    spin_briefly(found)
    assert found == {"GOMP_SPINCOUNT": "10000"}
    for chosen in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}):
        found = dict(chosen)
        spin_briefly(found)
        assert found == chosen


@pytest.mark.parametrize(("command", "spins"), [("generate", "10000"), ("serve", "10000"), ("train", None)])
def test_commands_but_training_say_so(command: str, spins: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a run share the cores, so their threads sleep at once (`strata train` says so itself)."""
    monkeypatch.setattr(sys, "argv", ["strata", command])
    environment: dict[str, str] = {}
    monkeypatch.setattr(main, "spin_briefly", lambda: spin_briefly(environment))
    monkeypatch.setattr(main, "app", lambda: None)
    main.main()
    assert environment.get("GOMP_SPINCOUNT") == spins


def test_torch_is_not_loaded_before() -> None:
    code = "import sys, strata.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
