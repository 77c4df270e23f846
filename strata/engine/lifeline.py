"""Ties a process that Strata started to its parent, so that none is left behind whatever becomes of the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends (Linux; elsewhere nothing).

    So a parent starts its children from a thread that lives as long as it does. A child whose parent has died before
    this call sees it at the end of its standard input. Only SIGKILL ends one that is stopped. What a hang-up, which may
    go to all processes, is to do is left to the parent.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)


class Ending:
    """Whether this process is asked to end: by SIGTERM, or by the end of its standard input.

    `descriptors` become readable then, for a poller; `is_end_requested` reads them. SIGINT is left to the parent, who
    hears the same Ctrl-C and decides when its children end.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self.descriptors = (self._reading, sys.stdin.fileno())
        signal.signal(signal.SIGTERM, lambda *_: os.write(self._writing, b"!"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def is_end_requested(self, readable: int) -> bool:
        """Whether a descriptor that is readable says so; what a parent writes to standard input is read and ignored."""
        return readable == self._reading or not os.read(readable, 4096)
