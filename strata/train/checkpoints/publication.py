"""A thread of the first rank that publishes a written checkpoint: disks take long to make one last, and steps go on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from strata.train.checkpoints.folder import part_path, prune, publish, remove, set_aside, unfinished
from strata.train.checkpoints.index import Index, StoredPiece
from strata.train.checkpoints.writer import STOPPED


class Publication:
    """Gives a checkpoint its index and its name and removes those it replaces; or removes it, if a rank failed.

    errors: why there is no checkpoint; warnings: what else went wrong; both complete as soon as `is_done`.
    """

    def __init__(self, folder: Path, step: int, keep: int, reports: Sequence[Mapping[str, Any]]) -> None:
        """keep: how many checkpoints remain. reports: what each rank says of its share, see `ShareWriter.report`."""
        self._folder, self._step, self._keep, self._reports = folder, step, keep, reports
        self.errors = [
            f"rank {rank}: {report['error']}"
            for rank, report in enumerate(reports)
            if report["error"] not in (None, STOPPED)
        ]
        self.warnings: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether there is a checkpoint, or will be none."""
        return self._done.is_set()

    def join(self) -> None:
        """Wait until what it replaces is removed, too."""
        self._thread.join()

    def _run(self) -> None:
        leftovers: list[Path] = []
        try:
            if not self.errors:
                self._publish()
            if self.errors:
                with suppress(OSError):  # it may not exist, and the disk may be why
                    set_aside(part_path(self._folder, self._step))
            # Listed while no rank can have begun another one.
            leftovers = unfinished(self._folder)
        finally:
            self._done.set()
        remove(leftovers)

    def _publish(self) -> None:
        files = {name: size for report in self._reports for name, size in report["files"].items()}
        try:
            pieces = [StoredPiece.of(piece) for report in self._reports for piece in report["pieces"]]
            index = Index(files, self._reports[0]["state_crc32"], pieces)
            index.check()
            path = publish(self._folder, self._step, index)
        except (OSError, ValueError) as error:
            self.errors = [f"rank 0: {type(error).__name__}: {error}"]
            return
        try:
            prune(self._folder, path, self._keep)
        except OSError as error:
            self.warnings = [f"checkpoints before {path} could not be removed: {error}"]
