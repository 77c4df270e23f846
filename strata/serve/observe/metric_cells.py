"""Numbers of one process that others can add up: float64 cells in a file that all API processes of a server see.

Adding to a cell is a store into memory, with no lock and no system call; a reader sums the files of all processes at
the moment it is asked, so whichever process answers, the sum never falls, nor the largest of a cell that only grows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

_WIDTH = 8  # bytes of a float64


class Cells:
    """`count` cells of this process, and the sums over all processes.

    folder: where the processes' files are, private to the server; None where one process is all there is.
    worker: number of this process, no other's; one that is started again under it goes on from its cells.
    """

    def __init__(self, count: int, folder: Path | None, worker: int) -> None:
        self._folder = folder
        self._size = count * _WIDTH
        self._own = folder / f"metrics-{worker}" if folder is not None else None
        self.values = memoryview(self._map()).cast("d")

    def sums(self) -> list[float]:
        """Every cell, added up over the processes."""
        sums = list(self.values)
        for cells in self._others():
            sums = [one + other for one, other in zip(sums, cells, strict=True)]
        return sums

    def largest(self) -> list[float]:
        """The largest value of every cell over the processes."""
        largest = list(self.values)
        for cells in self._others():
            largest = list(map(max, largest, cells))
        return largest

    def _map(self) -> mmap.mmap:
        if self._own is None:
            return mmap.mmap(-1, self._size)
        with self._own.open("a+b") as file:
            file.truncate(self._size)
            return mmap.mmap(file.fileno(), self._size)

    def _others(self) -> Iterator[memoryview[float]]:
        if self._folder is None:
            return
        for path in sorted(self._folder.glob("metrics-*")):
            if path != self._own and path.stat().st_size == self._size:
                yield memoryview(path.read_bytes()).cast("d")
