"""Notices that a rank makes no progress, says which one is the cause, and ends the process so that it can be restarted.

The watch is a thread, because the main thread of a rank that hangs is inside a collective. Ranks exchange what they
know through files in the run's folder, which they share for their checkpoints: collectives would hang as well, and a
TCPStore lives in one of the processes that may be stuck. A file also remains to be read afterwards.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from strata.comm.launch import World
from strata.comm.observer import CollectiveCall
from strata.train.faults.hang_diagnosis import Heartbeat, diagnose

# The exit code of a rank in a run that hangs: "a temporary failure, try again" in sysexits.h.
HUNG = 75
# The rank that writes the report ends first, so that a launcher that shows one rank shows the report.
_REPORTER_FIRST_SECONDS = 2.0
_MAX_RECENT = 1024


class HangWatch:
    """Knows what its rank is doing, and watches that it goes on. A context manager, around the steps of a run.

    Progress is a call of `at`, or a collective that starts or ends along an axis of `world`. A rank without any for
    `hang_seconds` writes where it is to standard error, as JSON, and its Python stacks to `rank-NNN.txt`; when all
    have, or after half of `hang_seconds`, one of them writes one line that names the cause, and all end with the exit
    code `HUNG`. What happens between two calls of `at` without a collective must take less than that, compilation too.
    """

    def __init__(self, world: World, folder: Path, hang_seconds: float) -> None:
        """folder: shared by all ranks; `rank-NNN.json` in it is where rank NNN was seen last. hang_seconds: 0 watches
        nothing.
        """
        self.world = dataclasses.replace(world, observer=self)
        """The world whose collectives are watched: make the mesh of it."""
        self._folder, self._hang_seconds = folder, hang_seconds
        self._interval = min(hang_seconds / 4, 10.0)
        self._place = (0, "start")
        self._moved = time.monotonic()
        self._waits: CollectiveCall | None = None
        self._last: dict[tuple[str, tuple[int, ...]], CollectiveCall] = {}
        self._recent: deque[CollectiveCall] = deque(maxlen=_MAX_RECENT)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        if self._hang_seconds:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.world.is_main:
                self._claim.unlink(missing_ok=True)
            self._moved = time.monotonic()
            self._write(self._heartbeat(hangs=False))
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopped.set()
        if self._hang_seconds:
            self._thread.join()

    def at(self, step: int, phase: str) -> None:
        """This rank begins a phase ("data", "forward", "backward", "reduce", "update", "checkpoint") of a step."""
        self._place = step, phase
        self._moved = time.monotonic()

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        key = axis, ranks
        before = self._last.get(key)
        call = CollectiveCall(operation, axis, ranks, 1 if before is None else before.number + 1, nbytes)
        self._last[key] = call
        self._recent.append(call)
        self._moved = time.monotonic()
        return call

    def waits(self, call: CollectiveCall | None) -> None:
        self._waits = call
        self._moved = time.monotonic()

    @property
    def _claim(self) -> Path:
        """Made by the one rank that writes the report."""
        return self._folder / "reporting"

    def _watch(self) -> None:
        written = time.monotonic()
        while not self._stopped.wait(min(self._hang_seconds / 20, 1.0)):
            now = time.monotonic()
            if now - self._moved >= self._hang_seconds:
                self._end()
            if now - written >= self._interval:
                with suppress(OSError):  # a full disk is for the checkpoints to tell
                    self._write(self._heartbeat(hangs=False))
                written = now

    def _end(self) -> None:
        """Write what is known, and end this process. The main thread cannot: it is what stands still."""
        try:
            beat = self._heartbeat(hangs=True)
            print(_line(beat), file=sys.stderr, flush=True)
            self._write(beat)
            with self._path(self.world.rank).with_suffix(".txt").open("w", encoding="utf-8") as stream:
                faulthandler.dump_traceback(stream)
            deadline = time.monotonic() + self._hang_seconds / 2
            while not all(one is not None and one.hangs for one in self._read()) and time.monotonic() < deadline:
                time.sleep(0.05)
            try:
                self._claim.touch(exist_ok=False)
            except FileExistsError:
                time.sleep(_REPORTER_FIRST_SECONDS)
            else:
                self._report()
        finally:
            os._exit(HUNG)

    def _report(self) -> None:
        beats, now = self._read(), time.time()
        line = f"strata: no progress for {self._hang_seconds:g} s: {diagnose(beats, now, self._interval)}"
        shown = {"line": line, "time": now, "ranks": beats}
        name = time.strftime("hang-%Y%m%dT%H%M%SZ.json", time.gmtime(now))
        (self._folder / name).write_bytes(msgspec.json.encode(shown))
        print(f"{line} (stacks and heartbeats: {self._folder})", file=sys.stderr, flush=True)

    def _heartbeat(self, *, hangs: bool) -> Heartbeat:
        step, phase = self._place
        last, recent = tuple(self._last.values()), tuple(self._recent) if hangs else ()
        idle = time.monotonic() - self._moved
        return Heartbeat(self.world.rank, step, phase, idle, time.time(), hangs, self._waits, last, recent)

    def _write(self, beat: Heartbeat) -> None:
        path = self._path(beat.rank)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(beat))
        part.replace(path)

    def _read(self) -> list[Heartbeat | None]:
        paths = map(self._path, range(self.world.size))
        return [msgspec.json.decode(path.read_bytes(), type=Heartbeat) if path.exists() else None for path in paths]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:03}.json"


def _line(beat: Heartbeat) -> str:
    """A rank's own line of the log."""
    shown: dict[str, Any] = {
        "hang": beat.rank,
        "step": beat.step,
        "phase": beat.phase,
        "seconds": round(beat.seconds, 1),
    }
    call = beat.waits or (beat.recent[-1] if beat.recent else None)
    if call is not None:
        shown |= {"collective": call.operation, "number": call.number, "axis": call.axis, "peers": call.ranks}
        shown |= {"waits": beat.waits is not None}
    return json.dumps(shown)
