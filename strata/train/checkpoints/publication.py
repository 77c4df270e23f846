"""A thread of the first rank that publishes a written checkpoint: disks take long to make one last, and steps go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from strata.train.checkpoints.folder import part_path, prune, publish, remove, set_aside, unfinished
from strata.train.checkpoints.index import Index
from strata.train.checkpoints.writer import STOPPED, ShareReport


class Publication:
    """Gives a checkpoint its index and its name and removes those it replaces; or removes it, if a rank failed.

    errors: why there is no checkpoint; warnings: what else went wrong; both complete as soon as `is_done`.
    """

    def __init__(self, folder: Path, step: int, keep: int, reports: Sequence[bytes]) -> None:
        """keep: how many checkpoints remain. reports: of each rank what `ShareWriter.report` says."""
        self._folder, self._step, self._keep = folder, step, keep
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(reports,), name="publish", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether there is a checkpoint, or will be none."""
        return self._done.is_set()

    @property
    def is_over(self) -> bool:
        """Whether what it replaces is removed, too."""
        return not self._thread.is_alive()

    def _run(self, reports: Sequence[bytes]) -> None:
        leftovers: list[Path] = []
        try:
            self._publish([msgspec.json.decode(report, type=ShareReport) for report in reports])
        except Exception as error:  # whatever it is, all ranks wait to hear of it
            self.errors.append(f"rank 0: {type(error).__name__}: {error}")
        if self.errors:
            with suppress(OSError):  # it may not exist, and the disk may be why
                set_aside(part_path(self._folder, self._step))
        with suppress(OSError):
            # Listed while no rank can have begun another one.
            leftovers = unfinished(self._folder)
        self._done.set()
        remove(leftovers)

    def _publish(self, reports: Sequence[ShareReport]) -> None:
        for rank, report in enumerate(reports):
            if report.error not in (None, STOPPED):
                self.errors.append(f"rank {rank}: {report.error}")
        if self.errors:
            return
        files = {name: size for report in reports for name, size in report.files.items()}
        index = Index(files, reports[0].state_crc32, [shard for report in reports for shard in report.shards])
        index.check()
        path = publish(self._folder, self._step, index)
        try:
            prune(self._folder, path, self._keep)
        except OSError as error:
            self.warnings.append(f"checkpoints before {path} could not be removed: {error}")
