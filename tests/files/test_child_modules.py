"""Processes that run modules of this package find it, installed or not, and nothing of their current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.files.child_modules import ROOT, command_of, with_package


def test_a_checkout_that_is_not_installed_is_found(tmp_path: Path) -> None:
    """-S leaves out what is installed; the folder that the process starts in has a package of the same name."""
    (tmp_path / "strata").mkdir()
    (tmp_path / "strata" / "__init__.py").write_text("raise RuntimeError('not this one')")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python, *options = command_of("strata.files.child_modules")
    command = [python, "-S", *options]
    assert subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, timeout=60).returncode == 1
    subprocess.run(command, cwd=tmp_path, env=with_package(bare), check=True, timeout=60)


@pytest.mark.parametrize("before", [None, "", "/one", f"/one{os.pathsep}/two"])
def test_what_stood_in_the_path_stays_in_front(before: str | None) -> None:
    variables = {"HOME": "/home"} | ({} if before is None else {"PYTHONPATH": before})
    found = with_package(variables)
    assert found["HOME"] == "/home"
    assert found["PYTHONPATH"].split(os.pathsep) == [*filter(None, (before or "").split(os.pathsep)), str(ROOT)]
    assert with_package(found) == found


def test_another_checkout_in_the_path_comes_behind_this_one(tmp_path: Path) -> None:
    """`python -m strata` in a checkout runs that one, whatever the path has, and so do the processes it starts."""
    (tmp_path / "strata").mkdir()
    (tmp_path / "strata" / "__init__.py").write_text("raise RuntimeError('not this one')")
    found = with_package(os.environ | {"PYTHONPATH": os.pathsep.join(["/one", str(tmp_path), str(ROOT)])})
    assert found["PYTHONPATH"].split(os.pathsep)[:3] == ["/one", str(ROOT), str(tmp_path)]
    assert with_package(found) == found
    subprocess.run(command_of("strata.files.child_modules"), cwd=tmp_path, env=found, check=True, timeout=60)


def test_an_installed_package_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that is installed for a user alone: what else lies there must not come before Python's own."""
    with monkeypatch.context() as patch:
        patch.setattr("site.getsitepackages", lambda: ["/usr/lib", str(ROOT)])
        assert with_package({"HOME": "/home"}) == {"HOME": "/home"}
    monkeypatch.setattr("site.getusersitepackages", lambda: str(ROOT))
    for enabled, added in ((True, {}), (False, {"PYTHONPATH": str(ROOT)}), (None, {"PYTHONPATH": str(ROOT)})):
        monkeypatch.setattr("site.ENABLE_USER_SITE", enabled)
        assert with_package({"HOME": "/home"}) == {"HOME": "/home"} | added


def test_the_current_folder_is_left_out() -> None:
    assert command_of("some.module") == [sys.executable, "-P", "-m", "some.module"]
