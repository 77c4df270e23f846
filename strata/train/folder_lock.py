"""One run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.files.locks import lock


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Inside, no other run may use the folder; its processes may. However this one ends, the folder is free again.

    Raises ValueError if another run uses it.
    """
    with (folder / "lock").open("a") as stream:
        lock(stream, f"another process trains in {folder}; wait for its end, or choose another out")
        yield
