"""Processes of engines: started in a group of their own, waited for, and gone afterwards with all that they started."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from benchmarks.peers.engines import ENVIRONMENT

# Seconds that a process gets to end by itself, and between two looks at it.
GRACE = 30.0
LOOK = 0.1
# Servers are on this machine: proxies of the environment are for others.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Lines of its log that an error shows.
TAIL = 25


class EngineFailed(RuntimeError):
    """An engine's process did not do what it was started for."""


class EngineProcess:
    """Use as a context manager. log: where its output goes; None for this process's own."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, log: Path | None = None) -> None:
        self._name = name
        self._command = list(command)
        self._folder = folder
        self._log = log

    def __enter__(self) -> EngineProcess:
        output = None if self._log is None else self._log.open("wb")
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, patience: float) -> None:
        """Until it has ended. Raises EngineFailed if it failed, or takes longer than so many seconds."""
        try:
            failed = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"{self._name} did not end within {patience:g} s{self._shown()}") from None
        if failed:
            raise EngineFailed(self._ended())

    def wait_until_ready(self, url: str, patience: float) -> float:
        """Seconds until `url` answers 200. Raises EngineFailed if the process ends or so many seconds pass before."""
        began = time.monotonic()
        while fetch(url) is None:
            self.require_alive()
            if time.monotonic() - began > patience:
                raise EngineFailed(
                    f"{self._name} was not ready within {patience:g} s ({url} did not answer 200); its log ends:\n"
                    f"{self._tail()}"
                )
            time.sleep(LOOK)
        return time.monotonic() - began

    def require_alive(self) -> None:
        """Raises EngineFailed if the process has ended."""
        if self._process.poll() is not None:
            raise EngineFailed(self._ended())

    def stop(self) -> None:
        """End it and all that it started; returns when none of them is left, so that their memory is free."""
        try:
            self._process.terminate()  # does nothing to one that has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        finally:
            _kill_group(self._process)

    def _ended(self) -> str:
        code = self._process.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"{self._name} ended {how}{self._shown()}"

    def _shown(self) -> str:
        return "; its output stands above" if self._log is None else f"; its log ends:\n{self._tail()}"

    def _tail(self) -> str:
        assert self._log is not None
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])


def end_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and a closed terminal end this process through what it must still stop: engines have sessions
    of their own, which nothing else ends. What is ignored already, as by nohup, stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def fetch(url: str) -> bytes | None:
    """What a server of this machine answers with status 200; None for anything else."""
    try:
        with _DIRECT.open(url, timeout=5) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def _kill_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process's group, and wait until nothing of it runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    end = time.monotonic() + GRACE
    while _group_runs(leader.pid) and time.monotonic() < end:
        time.sleep(LOOK)


def _group_runs(group: int) -> bool:
    """Whether a process of the group runs. One that has ended may stay in it where nobody collects orphans."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False
