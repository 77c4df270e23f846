"""Files that one process at a time may use. Each opening of a file counts as another process does."""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from pathlib import Path

import pytest

from strata.files.locks import wait_for


def test_who_comes_second_waits_until_the_first_closes(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("a") as second:
        assert wait_for(first, 0)
        assert not wait_for(second, 0)
        start = time.monotonic()
        assert not wait_for(second, 0.2)
        assert 0.2 <= time.monotonic() - start < 5
        threading.Timer(0.2, first.close).start()
        assert wait_for(second, 60)


def test_a_file_system_without_locks_lets_all_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as stream:
        assert wait_for(stream, 0)
