"""What compiles after the engine is ready: nothing should, since requests wait for it."""

from __future__ import annotations

from collections.abc import Callable

from strata.kernels.compiled import KINDS, Compiled, Kind, listen

_DONE: dict[Kind, str] = {"kernel": "compiled", "cached kernel": "read from the disk"}


class Compilations:
    """Counts what the process compiles and reads from the disk, by kind, between `begin` and `end`.

    The process is one: if it has several engines that are ready, each counts what any of them brings about.

    log: gets a line when something of a kind and name is met for the first time.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._log = log
        self._logged: set[tuple[Kind, str]] = set()
        self._stop: Callable[[], None] = lambda: None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def begin(self) -> None:
        self._stop()
        self._stop = listen(self._count)

    def end(self) -> None:
        """Count no more; others who count go on."""
        self._stop()

    def _count(self, compiled: Compiled) -> None:
        self.counts[compiled.kind] += 1
        if (compiled.kind, compiled.name) not in self._logged:
            self._logged.add((compiled.kind, compiled.name))
            variant = f" ({compiled.variant})" if compiled.variant else ""
            self._log(f"{_DONE[compiled.kind]} while serving: {compiled.name}{variant}")
