"""A killable helper process (see `killable_worker`) for a program with an event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from strata.text.killable_worker import (
    READ_BYTES,
    START_SECONDS,
    end_helper,
    not_started,
    pipes_of,
    start_helper,
    write_some,
)


class AsyncWorker:
    """One process that runs a module, started when first needed and again after a kill; it answers in order.

    Questions are written to it as they come, as far as its pipe has room. What it takes too long for, or dies of, fails
    alone: those behind go to the next process. It belongs to the event loop that it is first asked in.

    module: what the process runs; it calls `serve_answers`.
    deadline: seconds that one answer may take, once those before it are there.
    max_answer_bytes: bytes that one answer may have.
    """

    def __init__(self, module: str, deadline: float, max_answer_bytes: int) -> None:
        self._module, self._deadline, self._most_answer = module, deadline, max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: deque[_Question] = deque()  # written
        self._waiting: deque[_Question] = deque()  # to be written; of the first, a part may be
        self._writes_later = False
        self._received = bytearray()  # of an answer that is not complete
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `request` (plain JSON values), or {"error": ...} if there came none in time.

        Raises TypeError or ValueError if the request cannot be written as JSON.
        """
        line = f"{json.dumps({**request, 'seconds': self._deadline})}\n".encode("ascii")
        question = _Question(line, asyncio.get_running_loop().create_future())
        self._waiting.append(question)
        if self._process is None:
            self._start()
        elif self._ready:
            self._write()
        answer: dict[str, Any] = json.loads(await question.answer)
        return answer

    def close(self) -> None:
        """End the process; what it has not answered fails. A later question starts another one."""
        self._stop()
        for question in (*self._asked, *self._waiting):
            question.fail("it was ended")
        self._asked.clear()
        self._waiting.clear()

    def _start(self) -> None:
        try:
            self._process = start_helper(self._module)
        except OSError as error:
            self._give_up(error)
            return
        self._end_process: Callable[[], Any] = weakref.finalize(self, end_helper, self._process)
        self._writing, self._reading = pipes_of(self._process)
        self._ready = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)
        self._timer = self._loop.call_later(START_SECONDS, self._expire)

    def _stop(self) -> None:
        if self._process is None:
            return
        self._cancel_timer()
        self._loop.remove_reader(self._reading)
        self._loop.remove_writer(self._writing)
        self._writes_later = False
        self._received.clear()
        self._process.kill()
        self._process = None
        threading.Thread(target=self._end_process).start()  # what had much memory takes a while to be gone

    def _replace(self, reason: str) -> None:
        """The process is of no more use: what it was at fails, what is behind that goes to another."""
        self._stop()
        if not self._ready:
            self._give_up(not_started(self._module))
            return
        failed = self._head
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        if failed is not None:
            failed.fail(reason)
            self._waiting.popleft()
        for question in self._waiting:
            question.unsent = memoryview(question.line)
        if self._waiting:
            self._start()

    def _give_up(self, error: Exception) -> None:
        """There is no process to be had."""
        for question in self._waiting:
            if not question.answer.done():
                question.answer.set_exception(error)
        self._waiting.clear()

    @property
    def _head(self) -> _Question | None:
        """What the process is at, None if it has got nothing that it has not answered."""
        if self._asked:
            return self._asked[0]
        return self._waiting[0] if self._waiting and self._waiting[0].begun else None

    def _write(self) -> None:
        """Write what waits, as far as there is room; the rest when there is more."""
        idle = self._head is None
        try:
            while self._waiting:
                question = self._waiting[0]
                if question.begun or not question.answer.done():  # otherwise nobody waits for it any more
                    question.unsent = question.unsent[write_some(self._writing, question.unsent) :]
                    if question.unsent:
                        break
                    self._asked.append(question)
                self._waiting.popleft()
        except OSError:  # it has ended, which `_read` will find behind what it said before
            return
        if idle:
            self._set_deadline()
        if bool(self._waiting) != self._writes_later:
            self._writes_later = not self._writes_later
            if self._writes_later:
                self._loop.add_writer(self._writing, self._write)
            else:
                self._loop.remove_writer(self._writing)

    def _read(self) -> None:
        try:
            part = os.read(self._reading, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        searched = len(self._received)
        self._received += part
        while (end := self._received.find(b"\n", searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            self._take(line)
        if not part or len(self._received) > self._most_answer:
            self._replace(_DIED)

    def _take(self, line: bytes) -> None:
        if self._ready:
            self._asked.popleft().answered(line)
            self._set_deadline()
        else:  # its first words, which say so
            self._ready = True
            self._set_deadline()
            self._write()

    def _set_deadline(self) -> None:
        self._cancel_timer()
        if self._head is not None:
            self._timer = self._loop.call_later(self._deadline, self._expire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        expired = self._timer
        self._read()  # the answer may have come while the program was busy, and has set another timer then
        if self._timer is expired:
            self._replace(f"it ran longer than {self._deadline:g} s")


_DIED = "its process died"


class _Question:
    """unsent: what is left of the line to be written."""

    def __init__(self, line: bytes, answer: asyncio.Future[bytes]) -> None:
        self.line, self.answer = line, answer
        self.unsent = memoryview(line)

    @property
    def begun(self) -> bool:
        return len(self.unsent) < len(self.line)

    def answered(self, line: bytes) -> None:
        if not self.answer.done():  # whoever asked may have been cancelled
            self.answer.set_result(line)

    def fail(self, reason: str) -> None:
        self.answered(json.dumps({"error": reason}).encode())
