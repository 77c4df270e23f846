"""Starts the ranks of a run on this machine, and starts all of them again when one fails.

Each rank knows its place by the environment variables of torchrun, so a run over several machines is started with
torchrun and needs nothing else. torchrun itself prints what every rank says because one has failed, first and loudest
the ranks that only lost their connection; here the rank that failed first is shown, and it alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

# What a rank tells the launcher by its exit code: another try would end alike, and it has said why.
REFUSED = 2
# What ranks write to standard error appears this much later: longer than a rank takes to end after its last words.
HELD_BACK_SECONDS = 1.0
# How long ranks may take to end by themselves when the launcher is asked to end: enough to close the logs. One that
# imports, or waits for others, may never see the signal.
GRACE_SECONDS = 1.5
# So much later than the first rank end those that fail because it has ended: many polls, so that the launcher can tell.
_APART_SECONDS = 0.4
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1


def launch(command: Sequence[str], ranks: int, restarts: int = 0) -> int:
    """Run `command` as `ranks` processes, and again, up to `restarts` times, when one of them fails. Main thread only.

    A rank reads from `World.restarts` that it continues. Standard output goes where this process's goes, standard error
    as well, a second later. When a rank fails, the others are killed, and what they have said in the last second is
    dropped: only the one that ended first is shown. Interrupts (Ctrl-C) and SIGTERM go to all ranks, which then have
    `GRACE_SECONDS`, and of which nothing more is shown; a second one kills. No rank, and no process that it started,
    outlives this function; a rank does not outlive this process either, whatever ends it (Linux).

    Returns 0, or the exit code of the rank that failed first, as one process would end: 1 where it was `REFUSED`, 128
    and the number for a signal.
    """
    if ranks < 1 or restarts < 0:
        raise ValueError(f"{ranks} ranks and {restarts} restarts: at least 1 rank and 0 restarts are needed")
    with _signals() as signals:
        attempt = 0
        while True:
            failed = _run(command, ranks, attempt, signals)
            if signals:
                return 128 + signals[0]
            if failed is None:
                return 0
            if failed.code == REFUSED:
                return 1
            goes_on = attempt < restarts
            attempt += 1
            then = f"; restart {attempt} of {restarts}" if goes_on else ""
            print(f"strata: rank {failed.rank} {_ending(failed.code)}{then}", file=sys.stderr, flush=True)
            if not goes_on:
                return failed.code if failed.code > 0 else 128 - failed.code


@contextmanager
def ended_at_once(explain: Callable[[Exception], str | None]) -> Iterator[None]:
    """Around what a rank does: an error ends its process at once, with the code `REFUSED` for a ValueError and 1 for
    any other; without ranks it is raised as ever. explain: what to say instead of a traceback, if that says it all.

    In the seconds that an orderly end of Python takes, the launcher would show what other ranks say of the same. And it
    may not end: NCCL waits for captured steps to be freed, and the launcher, with all other ranks, for this one.
    """
    try:
        yield
    except Exception as error:
        if "RANK" not in os.environ:
            raise
        if (said := explain(error)) is not None:
            print(f"strata: error: {said}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        if not isinstance(error, ValueError):  # which all ranks raise alike
            time.sleep(_APART_SECONDS)
        os._exit(REFUSED if isinstance(error, ValueError) else 1)


class _Rank:
    """A process and what it wrote to standard error that has not appeared yet."""

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.rank, self.code = rank, 0
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to be killed with all that it starts
            preexec_fn=_die_with_launcher,
        )
        self._said: deque[tuple[float, bytes]] = deque()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def listen(self) -> None:
        self._reader.start()

    def has_ended(self) -> bool:
        """Whether it has; its process id stays taken until `end`."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, self.process.pid, options)
        if found is None:
            return False
        self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return True

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill it and what it has started; nothing new is said afterwards."""
        self.send(signal.SIGKILL)
        self.process.wait()
        if self._reader.is_alive():
            self._reader.join(_POLL_SECONDS)  # a process that left the group may keep the pipe open

    def show(self, age: float = 0.0) -> None:
        """What it said at least `age` seconds ago."""
        while self._said and time.monotonic() - self._said[0][0] >= age:
            sys.stderr.buffer.write(self._said.popleft()[1])
        sys.stderr.flush()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._said.append((time.monotonic(), chunk))


def _run(command: Sequence[str], ranks: int, attempt: int, signals: list[int]) -> _Rank | None:
    """One attempt. Returns the rank that failed first; None if all ended well or the launcher was asked to end."""
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    # Each rank would take all cores for itself.
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    started: list[_Rank] = []
    failed = None
    try:
        for rank in range(ranks):
            started.append(_Rank(rank, command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        for one in started:  # threads only now: starting a process beside them is not safe
            one.listen()
        failed = _first_failed(started, signals)
    finally:
        for one in started:
            one.end()
        for one in started:
            if one is failed or (failed is None and not signals):
                one.show()
    return failed


def _first_failed(started: Sequence[_Rank], signals: Sequence[int]) -> _Rank | None:
    """Wait until one fails. None when all have ended well, or as soon as may be after the launcher was asked to end."""
    running = list(started)
    passed_on, deadline = 0, float("inf")
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if not passed_on:
            for one in started:
                one.show(0.0 if signals else HELD_BACK_SECONDS)
        ended = [one for one in running if one.has_ended()]
        running = [one for one in running if one not in ended]
        failed = [one for one in ended if one.code]
        if failed and not signals:
            return min(failed, key=_suspicion)
        if passed_on < len(signals):
            for one in running:
                one.send(signals[passed_on])
            deadline = 0.0 if passed_on else time.monotonic() + GRACE_SECONDS
            passed_on += 1
    return None


def _suspicion(rank: _Rank) -> tuple[bool, bool, int]:
    """The order among ranks that ended within one poll: one that was killed did not end because of another's end; one
    that aborted is likely to, as libraries do that lose a connection.
    """
    has_aborted = rank.code == -signal.SIGABRT
    return has_aborted, rank.code > 0, rank.rank


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_launcher() -> None:
    """In a rank, before it runs: the kernel kills it when the launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The numbers of interrupts and terminations, as they arrive."""
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
