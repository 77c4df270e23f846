"""What each caller has used, by the name of its key: keys come while a server runs, so each has cells of its own."""

from __future__ import annotations

from pathlib import Path

from strata.serve.observe.metric_cells import Cells

KINDS = ("requests", "prompt_tokens", "generation_tokens")


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
