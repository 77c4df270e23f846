"""How engine processes have ended: from the launcher, whose children they are, to the processes that serve the API.

A connection to an engine that is killed ends without a word. Only its parent learns which signal it was, and only the
process that kills a silent one why.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

# How often it is looked whether the parent has said it, and for how long: it learns of the end when the others do.
_LOOK_EVERY = 0.01
_MAX_SECONDS = 1.0

_log = logging.getLogger("strata.serve")


class EngineEnds:
    """A file for each engine process that has ended, in a folder that is private to the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, pid: int) -> None:
        """A process has begun: what was told of an earlier one of the same number is not of it."""
        with suppress(OSError):
            self._file(pid).unlink()

    def tell(self, pid: int, how: str) -> None:
        """how: in words, for clients too; what was told first stays. Where no file can be written, as on a full disk,
        clients hear less and the other engines serve on."""
        if self._file(pid).is_file():
            return
        written = self._folder / f"ended-{pid}.{os.getpid()}"
        try:
            written.write_text(how)
            written.rename(self._file(pid))
        except OSError as error:
            _log.warning("clients are not told how an engine ended: %s: %s", written, error.strerror)

    async def find(self, pid: int) -> str | None:
        """How a process that has ended did; None if nobody says so in time, or it cannot be read."""
        for _ in range(int(_MAX_SECONDS / _LOOK_EVERY)):
            with suppress(OSError):  # not there yet, or no file can be opened: whoever waits must hear of the end
                return self._file(pid).read_text()
            await asyncio.sleep(_LOOK_EVERY)
        return None

    def _file(self, pid: int) -> Path:
        return self._folder / f"ended-{pid}"
