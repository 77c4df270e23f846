"""How engine processes have ended: from the launcher, whose children they are, to the processes that serve the API.

A connection to an engine that is killed ends without a word. Only its parent learns which signal it was.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

# How often it is looked whether the parent has said it, and for how long: it learns of the end when the others do.
_LOOK_EVERY = 0.01
_MOST_SECONDS = 1.0


class EngineEnds:
    """A file for each engine process that has ended, in a folder that is private to the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, pid: int, how: str) -> None:
        """how: in words, for clients too."""
        written = self._folder / f"ended-{pid}.part"
        written.write_text(how)
        written.rename(self._file(pid))

    async def find(self, pid: int) -> str | None:
        """How a process that has ended did; None if nobody says so in time."""
        for _ in range(int(_MOST_SECONDS / _LOOK_EVERY)):
            if self._file(pid).exists():
                return self._file(pid).read_text()
            await asyncio.sleep(_LOOK_EVERY)
        return None

    def _file(self, pid: int) -> Path:
        return self._folder / f"ended-{pid}"
