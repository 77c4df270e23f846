"""A server in a process of its own, for as long as a `with` lasts."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from benchmarks.faults.processes import descendants, is_there

# In which the server must have begun, and must have ended after SIGTERM.
START_SECONDS = 300.0
_END_SECONDS = 60.0
_WORDS = 600


@dataclass
class ServerProcess:
    """url: where it is. exit_code, left: how it ended, and how many of its processes were still there; once it has."""

    process: subprocess.Popen[bytes]
    url: str
    exit_code: int | None = None
    left: int = 0


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """`strata serve` with these arguments, once it is ready, on a free port. Raises ValueError if it does not start."""
    command = [sys.executable, "-m", "strata", "serve", *arguments, "--port", "0"]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=printed, stderr=said)
        server = None
        try:
            server = ServerProcess(process, _address(process, printed, said))
            yield server
        finally:
            before = descendants(process.pid)
            code = _end(process)
            if server is not None:
                server.exit_code, server.left = code, sum(map(is_there, before))


def _address(process: subprocess.Popen[bytes], printed: IO[bytes], said: IO[bytes]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (found := re.search(r" at (http://\S+) \(", _text(printed))) is not None:
            return found[1]
        time.sleep(0.05)
    how = "has not started" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise ValueError(f"the server {how}: {_text(said)[-_WORDS:].strip()}")


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
