"""Which replicas an operator drains, as every API process of a server sees it at once."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class LastReplica(ValueError):
    """A replica that may not be drained, since nobody would take requests then; the message says so in one line."""


class ReplicaDrains:
    """A byte for each replica, in a file that the API processes of a server map into their memory: looking costs no
    system call, and a process that is started again finds what was asked of the others."""

    def __init__(self, replicas: int, folder: Path | None = None) -> None:
        """folder: private to the server; None where one process is all there is."""
        self._file = None if folder is None else (folder / "drains").open("a+b")
        if self._file is not None:
            self._file.truncate(replicas)
        self._flags = mmap.mmap(-1 if self._file is None else self._file.fileno(), replicas)

    def drains(self, replica: int) -> bool:
        """Whether it is to take no new requests."""
        return bool(self._flags[replica])

    def drain(self, replica: int, others: Iterable[int]) -> None:
        """Let a replica take no new requests. others: replicas that live.

        Raises LastReplica unless one of those goes on to take requests.
        """
        with self._alone():
            if all(self.drains(other) for other in others):
                raise LastReplica(f"replica {replica} is the last that takes requests: resume another one first")
            self._flags[replica] = 1

    def resume(self, replica: int) -> None:
        """Let it take requests again."""
        with self._alone():
            self._flags[replica] = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two processes that drain the last two replicas would each see the other one serve."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
