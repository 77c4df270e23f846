"""By what the ranks of an engine see that the others live: two counters of each, in memory that they share."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading

# How often a rank says that it lives, in seconds.
HEARTBEAT_SECONDS = 0.25
_PAIR = struct.Struct("<QQ")


class Heartbeats:
    """Of each rank: how often it has said that it lives, and how many messages it is done with."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of a file of `_PAIR.size` bytes a rank; it may be closed then."""
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    def of(self, rank: int) -> tuple[int, int]:
        """(beats, messages that it is done with)."""
        beats, done = _PAIR.unpack_from(self._memory, rank * _PAIR.size)
        return beats, done

    def signal(self, rank: int) -> None:
        """Say once that the rank lives."""
        at = rank * _PAIR.size
        struct.pack_into("<Q", self._memory, at, struct.unpack_from("<Q", self._memory, at)[0] + 1)

    def done(self, rank: int, messages: int) -> None:
        """Say that the rank is done with so many messages."""
        struct.pack_into("<Q", self._memory, rank * _PAIR.size + 8, messages)

    def keep_beating(self, rank: int) -> None:
        """Say again and again that the rank lives, in a thread: as long as the process runs, whatever it waits for."""

        def run() -> None:
            waiting = threading.Event()
            while True:
                self.signal(rank)
                waiting.wait(HEARTBEAT_SECONDS)

        threading.Thread(target=run, name="beats", daemon=True).start()


def shared_file(ranks: int) -> int:
    """A descriptor of a file for so many ranks that has no name, so that nothing is left of it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(ranks * _PAIR.size)
        return os.dup(file.fileno())
