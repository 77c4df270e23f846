"""Writes checkpoints of all ranks while training goes on, and puts the newest one back into a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from strata.comm.collectives import Pending, all_gather_bytes, all_gather_json, start_all_reduce
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.train.checkpoints.folder import (
    Warn,
    check_recipe,
    checkpoint_path,
    checkpoints,
    prune,
    publish,
    read_state,
    remove,
    set_aside,
    step_of,
    unfinished,
    unfinished_path,
)
from strata.train.checkpoints.index import CorruptCheckpoint, Index
from strata.train.checkpoints.reader import load
from strata.train.checkpoints.state import StateShard
from strata.train.checkpoints.writer import STOPPED, HostBuffer, ShareReport, ShareWriter, Snapshot

_HOST = torch.device("cpu")
_POLL_SECONDS = 0.01


class Checkpointer:
    """The checkpoints of a run, in a folder that all ranks see. Every rank makes one, and calls its methods alike.

    A step: the passes, `before_update`, the optimizer's update, `poll`, and after some steps `start`. One checkpoint at
    a time is under way; at the end `finish`. A rank that cannot write makes the checkpoint fail on all of them, and
    the run goes on. A rank that fails before `finish` ends by `os._exit` (see `strata.train.launch.ended_at_once`): an
    orderly end of Python waits for what the other ranks have yet to say at a poll.

    stalled_seconds: for how long, since the beginning, these calls have kept the host from training.
    """

    def __init__(
        self, folder: Path, world: World, *, keep: int, warn: Warn, waits: Callable[[], None] = lambda: None
    ) -> None:
        """Removes what an interrupted run left unfinished. keep: how many checkpoints remain. warn: is called, on every
        rank, for a checkpoint that could not be written or read. waits: called now and then while a call waits for one
        to be written, which may take long.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep} checkpoints must be at least 1")
        self.folder, self.world, self.keep, self.warn, self._waits = folder, world, keep, warn, waits
        self.stalled_seconds = 0.0
        self._world_axis = Mesh.of(world, {"dp": world.size}).axis("dp")
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._buffer = HostBuffer(0, pinned=False)
        self._writer: ShareWriter | None = None
        self._is_handed_over = False  # the one under way, whose shares are all written, to `_publication`
        self._publication: Publication | None = None  # the last, on the first rank
        self._status: Pending | None = None  # how far all ranks were at the poll before
        self._step = 0
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            remove(unfinished(folder))
        start_all_reduce(torch.ones(1), self._world_axis).wait()  # no rank writes before it is tidy

    def prepare(self, shards: Sequence[StateShard]) -> None:
        """Allocate the host memory for checkpoints of such shards. The first `start` does it otherwise, and pinned
        memory takes seconds. The memory is kept.
        """
        snapshot = Snapshot(shards)
        if self._buffer.size < snapshot.size or (snapshot.is_on_device and not self._buffer.pinned):
            self._buffer = HostBuffer(snapshot.size, pinned=snapshot.is_on_device)

    def start(self, step: int, state: Mapping[str, Any], shards: Sequence[StateShard]) -> None:
        """Begin the checkpoint of a step. The shards may change again after `before_update`.

        state: of the run, what JSON can hold; `restore` wants a "recipe" in it, and steps that it has under `NEEDED`
        keep their checkpoints. shards: as the current stream leaves them. If the checkpoint before is not yet written,
        waits for it.
        """
        self.finish()
        with self._stall():
            self.prepare(shards)
            snapshot = Snapshot(shards)
            complete = self._copy(snapshot)
            text = json.dumps(state, indent=2) + "\n" if self.world.is_main else None
            self._step = step
            self._writer = ShareWriter(
                unfinished_path(self.folder, step),
                self.world.rank,
                text,
                snapshot,
                self._buffer,
                *(partial(_wait, event, self.world.device) for event in (complete, self._copied)),
            )

    def before_update(self) -> None:
        """Call this before the shards change: the device's stream, not the host, waits for copies of what is on the
        device; the host waits for those of what it holds itself.

        An update that is part of a captured graph begins with the graph: call this before the replay.
        """
        if self._writer is None:
            return
        if self._copied is not None:
            torch.cuda.current_stream(self.world.device).wait_event(self._copied)
        with self._stall():
            self._writer.wait_for_host_copies()

    def poll(self) -> Path | None:
        """The checkpoint that has just become whole, if one has. While one is under way, a rank waits for those that
        have not yet come to the poll before this one.
        """
        if self._writer is None:
            return None
        with self._stall():
            return self._settle(self._writer)

    def finish(self) -> Path | None:
        """Wait for the checkpoint under way, the first rank also until what it replaces is removed; the result is that
        of `poll`.
        """
        path = None
        while self._writer is not None:
            path = self.poll()
            self._waits()
            with self._stall():
                time.sleep(_POLL_SECONDS)
        while self._publication is not None and not self._publication.is_over:
            self._waits()
            with self._stall():
                time.sleep(_POLL_SECONDS)
        return path

    def restore(
        self,
        shards: Sequence[StateShard],
        recipe: Mapping[str, Any],
        *,
        before: int | None = None,
        at: int | None = None,
    ) -> dict[str, Any] | None:
        """Fill the shards from the newest checkpoint that can be read, whatever layout wrote it. Returns the state that
        was given to `start`; None if there is no checkpoint.

        recipe: what the checkpoint must have been made with, see `check_recipe`. before: if given, checkpoints of this
        step and later ones are given up for good. at: if given, the checkpoint of this step and no other; None is
        returned if it cannot be read, and some shards may be filled then. Raises ValueError, on all ranks, if it
        is another, if the checkpoint is of another model or optimizer, or if all checkpoints are corrupt.
        """
        if before is not None and self.world.is_main:
            for path in checkpoints(self.folder):
                if step_of(path) >= before:
                    set_aside(path)
        # As the first rank sees the folder, so that all ranks read the same.
        there = [path.name for path in checkpoints(self.folder) if at in (None, step_of(path))]
        found = all_gather_json(there, self._world_axis, _HOST)[0]
        for number, path in reversed([*enumerate(self.folder / name for name in found)]):
            state: dict[str, Any] = {}
            outcome = {"corrupt": "", "wrong": ""}
            try:
                state = read_state(path)
                check_recipe(path, state["recipe"], recipe)
                load(path, shards)
            except CorruptCheckpoint as error:
                outcome["corrupt"] = str(error)
            except ValueError as error:
                outcome["wrong"] = str(error)
            outcomes = all_gather_json(outcome, self._world_axis, _HOST)
            if wrong := [one["wrong"] for one in outcomes if one["wrong"]]:
                raise ValueError(wrong[0])
            if not (corrupt := [one["corrupt"] for one in outcomes if one["corrupt"]]):
                return state
            self.warn(corrupt[0] + (f"; goes on from the one before, {found[number - 1]}" if number else ""))
        if found and at is None:
            raise ValueError(f"all {len(found)} checkpoints in {self.folder} are corrupt; remove them to begin again")
        return None

    def _copy(self, snapshot: Snapshot) -> torch.cuda.Event | None:
        """Begin to copy from the device. Returns what marks the moment from which tensors on the host have values."""
        if self._stream is None:
            return None
        # A thread that waits for it must not keep a core busy.
        complete, self._copied = torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)
        complete.record(torch.cuda.current_stream(self.world.device))
        self._stream.wait_event(complete)
        with torch.cuda.stream(self._stream):
            snapshot.copy(self._buffer, from_device=True)
        self._copied.record(self._stream)
        return complete

    def _settle(self, writer: ShareWriter) -> Path | None:
        """Have the checkpoint published once all ranks have written their shares; the path when that is done, too.

        Several ranks go by what they said at the poll before, which has arrived by now: steps never end at one moment
        on all.
        """
        status = self._share_status(writer) if self._world_axis.group is None else self._status
        self._status = None
        if status is not None:
            all_good, all_written, all_published = (bool(flag) for flag in status.wait().tolist())
            if all_published:
                return self._end()
            if not all_good:
                writer.stop()
            if all_written and not self._is_handed_over:
                self._hand_over(writer)
        self._status = self._share_status(writer)
        return None

    def _share_status(self, writer: ShareWriter) -> Pending:
        """Begin to share how far this rank is: whether nothing failed, all is written and all is published."""
        report = writer.report
        published = self._is_handed_over and (self._publication is None or self._publication.is_done)
        good = report is None or report.error is None
        flags = torch.tensor((good, report is not None, published), dtype=torch.int32)
        return start_all_reduce(flags, self._world_axis, "min")

    def _hand_over(self, writer: ShareWriter) -> None:
        """Give the reports of all ranks to the first one's thread."""
        reports = all_gather_bytes(msgspec.json.encode(writer.report), self._world_axis, _HOST)
        self._is_handed_over = True
        if self.world.is_main:
            self._publication = Publication(self.folder, self._step, self.keep, reports)

    def _end(self) -> Path | None:
        """Share with all ranks what has become of the checkpoint; its path, if there is one."""
        self._writer, self._copied, self._is_handed_over = None, None, False
        status = ([], []) if self._publication is None else (self._publication.errors, self._publication.warnings)
        errors, warnings = all_gather_json(status, self._world_axis, _HOST)[0]
        for warning in warnings:
            self.warn(warning)
        if errors:
            self.warn(f"the checkpoint of step {self._step} was not written ({'; '.join(errors)}); those before remain")
            return None
        return checkpoint_path(self.folder, self._step)

    @contextmanager
    def _stall(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stalled_seconds += time.perf_counter() - began


class Publication:
    """Gives a checkpoint its index and its name and removes those it replaces; or removes it, if a rank failed. In a
    thread of the first rank: disks take long to make one last, and steps go on.

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
                set_aside(unfinished_path(self._folder, self._step))
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


def _wait(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Wait, in another thread, for what happens on the device; nothing if there is none."""
    if event is not None:
        # Or the thread would make a context, and take memory, on the first device.
        torch.cuda.set_device(device)
        event.synchronize()
