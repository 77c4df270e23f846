"""A helper process for work that comes from outside and may never end: it is killed at a deadline and started again.

Both ends are here: `KillableWorker` for the program, `serve_answers` for the process. They speak JSON lines over pipes;
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


class Helper:
    """A process that runs a module, which calls `serve_answers`; it is asked one question at a time, its pipes never
    block, and it ends with this object. writing, reading: descriptors to wait for.

    Raises OSError if there is no process to be had.
    """

    def __init__(self, module: str, max_answer_bytes: int) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
        self.process = process = subprocess.Popen(
            command_of(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=with_package(environment),
            start_new_session=True,  # Ctrl-C in the terminal is for the parent
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.writing, self.reading = process.stdin.fileno(), process.stdout.fileno()
        for pipe in (self.writing, self.reading):
            os.set_blocking(pipe, False)
        self._max_answer = max_answer_bytes
        self._unsent, self._received = memoryview(b""), bytearray()
        self.end = weakref.finalize(self, _end, process)
        """Kill it and wait until it is gone. A second call has no effect."""

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def tell(self, line: bytes) -> bool:
        """Begin to ask; as of `write`."""
        self._unsent, self._received = memoryview(line), bytearray()
        return self.write()

    def write(self) -> bool:
        """Write what the pipe has room for; whether that was all, or is of no use since the process has ended."""
        try:
            self._unsent = self._unsent[os.write(self.writing, self._unsent) if self._unsent else 0 :]
        except BlockingIOError:
            pass
        except OSError:  # which `read` finds behind what was said before
            self._unsent = memoryview(b"")
        return not self._unsent

    def read(self) -> bytes | None:
        """The answer; empty if there will be none, since it has ended or says too much, and None while more is to
        come."""
        try:
            part = os.read(self.reading, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        self._received += part
        if part.endswith(b"\n"):
            return bytes(self._received)
        return None if part and len(self._received) <= self._max_answer else b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


class KillableWorker:
    """One process that runs a module, started when first needed and again after a kill. Thread-safe.

    module: what the process runs; it calls `serve_answers`.
    deadline: seconds that one answer may take.
    max_answer_bytes: bytes that one answer may have.
    """

    def __init__(self, module: str, deadline: float, max_answer_bytes: int) -> None:
        self._module, self._deadline, self._max_answer = module, deadline, max_answer_bytes
        self._lock = threading.Lock()
        self._helper: Helper | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `request` (plain JSON values), or {"error": ...} if there came none in time.

        Raises TypeError or ValueError if the request cannot be written as JSON.
        """
        line = question(request, self._deadline)
        with self._lock:
            if self._helper is None or self._helper.has_ended:
                self._stop()
                self._helper = Helper(self._module, self._max_answer)
                if not _exchange(self._helper, b"", START_SECONDS):
                    self._stop()
                    raise not_started(self._module)
            answer = _exchange(self._helper, line, self._deadline)
            if not answer:
                self._stop()
        return reply_of(answer, self._deadline)

    def close(self) -> None:
        """End the process. A later question starts another one."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._helper is not None:
            self._helper.end()
        self._helper = None


def _exchange(helper: Helper, line: bytes, seconds: float) -> bytes | None:
    """Send a line (none if empty) and read one answer; empty if there is none, None if its time is over.

    One thread does all: to start another for the deadline would take longer than most answers.
    """
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(helper.reading, select.POLLIN)
    if not helper.tell(line):
        poll.register(helper.writing, select.POLLOUT)
    while True:
        ready = [pipe for pipe, _ in poll.poll(max(0.0, 1e3 * (deadline - time.monotonic())))]
        if not ready:
            return None
        if helper.writing in ready and helper.write():
            poll.unregister(helper.writing)
        if helper.reading in ready and (answer := helper.read()) is not None:
            return answer


def question(request: Mapping[str, Any], deadline: float) -> bytes:
    """A request as the helper reads it. Raises TypeError or ValueError if it cannot be written as JSON."""
    return f"{json.dumps({**request, 'seconds': deadline})}\n".encode("ascii")


def reply_of(answer: bytes | None, deadline: float) -> dict[str, Any]:
    """What an answer says, as of `Helper.read`; None for one that did not come in time."""
    if not answer:
        return {"error": f"it ran longer than {deadline:g} s" if answer is None else "its process died"}
    reply: dict[str, Any] = json.loads(answer)
    return reply


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


def not_started(module: str) -> RuntimeError:
    """What is raised when a helper ends, or says nothing, before it is ready."""
    return RuntimeError(f"a helper process did not start: try {' '.join(command_of(module))}")
