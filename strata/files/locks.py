"""A file that one process at a time may use."""

from __future__ import annotations

import fcntl
from typing import IO, Any


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
