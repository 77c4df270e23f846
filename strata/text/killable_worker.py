"""A helper process for work that comes from outside and may never end: it is killed at a deadline and started again.

Both ends are here: `KillableWorker` for the program, `serve_answers` for the helper. They speak JSON lines over pipes;
nothing else of Strata is loaded, so that a helper starts in a blink. `async_worker` has the end for event loops.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from strata.files.child_modules import command_of, with_package

START_SECONDS = 30.0
_NICENESS = 5  # of who gives way: a third of the time that others get, where all want more than there is
READ_BYTES = 1 << 16

# What Python needs to start, and the time zone. Foreign code that broke out would find no keys here.
_PASSED_ENVIRONMENT = ("PATH", "HOME", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")


class KillableWorker:
    """One process that runs a module, started when first needed and again after a kill. Thread-safe.

    module: what the process runs; it calls `serve_answers`.
    deadline: seconds that one answer may take.
    max_answer_bytes: bytes that one answer may have.
    """

    def __init__(self, module: str, deadline: float, max_answer_bytes: int) -> None:
        self._module, self._deadline, self._most_answer = module, deadline, max_answer_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], Any] = lambda: None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `request` (plain JSON values), or {"error": ...} if there came none in time.

        Raises TypeError or ValueError if the request cannot be written as JSON.
        """
        line = json.dumps({**request, "seconds": self._deadline})
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            reply, expired = self._exchange(line, self._deadline)
            if reply is None or expired:
                self._stop()
        if reply is None:
            return {"error": f"it ran longer than {self._deadline:g} s" if expired else "its process died"}
        return reply

    def close(self) -> None:
        """End the process. A later question starts another one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        self._process = start_helper(self._module)
        self._end_process = weakref.finalize(self, end_helper, self._process)
        ready, _ = self._exchange("", START_SECONDS)
        if ready is None:
            self._stop()
            raise not_started(self._module)

    def _stop(self) -> None:
        self._end_process()
        self._process = None

    def _exchange(self, line: str, seconds: float) -> tuple[dict[str, Any] | None, bool]:
        """Send a line (none if empty) and read one answer. None if there is none; then, whether time ran out.

        One thread does all: to start another for the deadline would take longer than most answers.
        """
        assert self._process is not None
        deadline = time.monotonic() + seconds
        writing, reading = pipes_of(self._process)
        unsent = memoryview(f"{line}\n".encode("ascii") if line else b"")
        answer = bytearray()
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        try:
            unsent = unsent[write_some(writing, unsent) :]
            if unsent:
                poll.register(writing, select.POLLOUT)
            while not answer.endswith(b"\n"):
                ready = poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))
                if not ready:
                    return None, True
                for pipe, _ in ready:
                    if pipe == reading:
                        part = os.read(reading, READ_BYTES)
                        answer += part
                        if not part or len(answer) > self._most_answer:
                            return None, False
                    else:
                        unsent = unsent[write_some(writing, unsent) :]
                        if not unsent:
                            poll.unregister(writing)
        except OSError:  # the pipe broke
            return None, False
        return json.loads(answer), False


def serve_answers(answer: Callable[[dict[str, Any]], dict[str, Any]], memory_bytes: int) -> None:
    """What the helper runs: answer each request until the program closes the pipe, with so much memory at most.

    Where there are too few processors, the program itself comes first.
    """
    give_way()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the program's to judge
    with suppress(ValueError, OSError):  # macOS has no such limit; the deadline holds there too
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The program kills this process at the deadline; the alarm ends it should the program have died meanwhile.
        signal.setitimer(signal.ITIMER_REAL, 2 * request["seconds"])
        reply = json.dumps(answer(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, flush=True)


def give_way() -> None:
    """Have this thread, or process if it is the first one, come after others where there are too few processors."""
    with suppress(OSError):  # what only Linux can do for a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def start_helper(module: str) -> subprocess.Popen[bytes]:
    """A helper that runs `module`, which is to be taken out of the way by `end_helper`; its pipes never block."""
    environment = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
    process = subprocess.Popen(
        command_of(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=with_package(environment),
        start_new_session=True,  # Ctrl-C in the terminal is for the parent
    )
    for pipe in pipes_of(process):
        os.set_blocking(pipe, False)
    return process


def pipes_of(helper: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The descriptors to write requests to and to read answers from."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    return helper.stdin.fileno(), helper.stdout.fileno()


def write_some(pipe: int, line: memoryview) -> int:
    """How many bytes of a line the pipe has room for, which are written. Raises OSError if the helper has ended."""
    try:
        return os.write(pipe, line) if line else 0
    except BlockingIOError:
        return 0


def end_helper(process: subprocess.Popen[bytes]) -> None:
    """Kill a helper and wait until it is gone."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def not_started(module: str) -> RuntimeError:
    """What is raised when a helper ends, or says nothing, before it is ready."""
    return RuntimeError(f"a helper process did not start: try {' '.join(command_of(module))}")
