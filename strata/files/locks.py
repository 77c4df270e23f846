"""A file that one process at a time may use."""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any

_PAUSE = 0.05


def wait_for(stream: IO[Any], seconds: float) -> bool:
    """Lock an open file until it is closed, once no other process holds it; False if one still does after so long.

    A file system without locks lets all in.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_PAUSE)
        except OSError:
            return True
        else:
            return True


def lock(stream: IO[Any], refusal: str) -> None:
    """Lock an open file until it is closed; however the process ends, it is free again.

    Raises ValueError(refusal) if another process holds it. A file system without locks refuses nobody.
    """
    if not wait_for(stream, 0):
        raise ValueError(refusal)
