"""A file that one process at a time may use."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from typing import IO, Any


def wait_for(stream: IO[Any]) -> None:
    """Lock an open file until it is closed, once no other process holds it. A file system without locks lets all in."""
    with suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX)


def lock(stream: IO[Any], refusal: str) -> None:
    """Lock an open file until it is closed; however the process ends, it is free again.

    Raises ValueError(refusal) if another process holds it. A file system without locks refuses nobody.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None
    except OSError:
        pass
