"""Numbers of one process that others can add up: float64 cells in a file that all API processes of a server see.

Adding to a cell is a store into memory, with no lock and no system call; a reader sums the files of all processes at
the moment it is asked, so whichever process answers, the sum never falls, nor the largest of a cell that only grows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

_WIDTH = 8  # bytes of a float64
KINDS = ("requests", "prompt_tokens", "generation_tokens")


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


class CallerCounts:
    """Counts of one API process. folder, worker: as `Cells` has them."""

    def __init__(self, folder: Path | None, worker: int) -> None:
        self._folder, self._worker = folder, worker
        self._cells: dict[str, Cells] = {}
        self._values: dict[str, memoryview[float]] = {}

    def of(self, caller: str) -> memoryview[float]:
        """One number for each of KINDS, to be added to. caller: what a key may be called, which names a folder here."""
        found = self._values.get(caller)
        if found is None:
            found = self._values[caller] = self._of(caller).values
        return found

    def sums(self) -> dict[str, list[float]]:
        """Of all processes, by caller: those of a key that there is no more, too."""
        names = set(self._cells)
        if self._folder is not None:
            names.update(path.name.removeprefix("caller-") for path in self._folder.glob("caller-*"))
        return {name: self._of(name).sums() for name in sorted(names)}

    def _of(self, caller: str) -> Cells:
        found = self._cells.get(caller)
        if found is None:
            folder = None if self._folder is None else self._folder / f"caller-{caller}"
            if folder is not None:
                folder.mkdir(exist_ok=True)
            found = self._cells[caller] = Cells(len(KINDS), folder, self._worker)
        return found
