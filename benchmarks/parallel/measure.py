"""Measuring in processes, each with a time limit: what hangs or fails costs one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from benchmarks.parallel.plan import RanksMeasurement
from benchmarks.parallel.record import Record
from strata.bench.result import ERROR

# Of what a failed process has said, in a line.
_MAX_CHARACTERS = 400


def measure(measurement: RanksMeasurement, repeat: int, limit: float, commit: str | None) -> Record:
    """Run one measurement, for at most `limit` seconds."""
    start = time.monotonic()
    found = run_limited([sys.executable, "-m", "strata", *measurement.command(repeat)], limit)
    seconds = time.monotonic() - start
    if isinstance(found, str):
        return Record(measurement, seconds, commit, fault=found)
    return Record(measurement, seconds, commit, found)


def run_limited(command: Sequence[str], limit: float) -> list[dict[str, Any]] | str:
    """The lines of JSON that a process prints, or in a line why it has failed."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said, _ending_through_what_runs():
        process = subprocess.Popen(command, stdout=printed, stderr=said, start_new_session=True)
        try:
            status = process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"no end within {limit:g} s"
            raise
        lines, words = (_text(file) for file in (printed, said))
    if status == 0:
        return [json.loads(line) for line in lines if line.startswith("{")]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    return f"{how}: {_reason(words)[:_MAX_CHARACTERS]}"


def _reason(said: Sequence[str]) -> str:
    """The line that says why: what a command ends with, behind which its message may go on (as with a ledger), or else
    the last one, as of a traceback."""
    lines = [line.strip() for line in said if line.strip()]
    told = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (told or lines or [""])[-1]


@contextmanager
def _ending_through_what_runs() -> Iterator[None]:
    """SIGTERM and a closed terminal are raised as exits, as Ctrl-C is: nothing else ends what has a session of its own.
    What is ignored already, as by nohup, stays so. In the main thread alone, as all handlers of signals."""
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _text(file: Any) -> list[str]:
    file.seek(0)
    text: str = file.read().decode("utf-8", "replace")
    return text.splitlines()
