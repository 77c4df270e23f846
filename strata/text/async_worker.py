"""A killable helper process (see `killable_worker`) for a program with an event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
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

    What it takes too long for, or dies of, fails alone: what waits behind goes to the next process. It belongs to the
    event loop that it is first asked in.

    module: what the process runs; it calls `serve_answers`.
    deadline: seconds that one answer may take, once those before it are there.
    max_answer_bytes: bytes that one answer may have.
    """

    def __init__(self, module: str, deadline: float, max_answer_bytes: int) -> None:
        self._module, self._deadline, self._most_answer = module, deadline, max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[bytes | None] | None = None
        self._received = bytearray()
        self._closed = 0  # how often

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `request` (plain JSON values), or {"error": ...} if there came none in time.

        Raises TypeError or ValueError if the request cannot be written as JSON, and RuntimeError if there is no process
        to be had.
        """
        line = f"{json.dumps({**request, 'seconds': self._deadline})}\n".encode("ascii")
        closed = self._closed
        async with self._turn:
            answer: bytes | None = b""
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            if closed == self._closed and self._process is None:
                await self._start()
            if closed == self._closed:
                answer = await self._exchange(line, self._deadline)
            if closed != self._closed:
                return {"error": "it was ended"}
            if not answer:
                self._stop()
                return {"error": f"it ran longer than {self._deadline:g} s" if answer is None else "its process died"}
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def close(self) -> None:
        """End the process; what it has not answered fails. A later question starts another one."""
        self._closed += 1
        self._stop()

    async def _start(self) -> None:
        self._process = start_helper(self._module)
        self._end_process = weakref.finalize(self, end_helper, self._process)
        self._writing, self._reading = pipes_of(self._process)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)
        closed = self._closed
        if not await self._exchange(b"", START_SECONDS) and closed == self._closed:  # its first words
            self._stop()
            raise not_started(self._module)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._loop.remove_reader(self._reading)
        self._loop.remove_writer(self._writing)
        self._set_answer(b"")
        process.kill()
        threading.Thread(target=self._end_process).start()  # what had much memory takes a while to be gone

    async def _exchange(self, line: bytes, seconds: float) -> bytes | None:
        """What the process says next, after it was told a line; nothing if it dies, None if its time is over."""
        self._answer = self._loop.create_future()
        self._received.clear()
        self._unsent = memoryview(line)
        self._write()
        if self._unsent:
            self._loop.add_writer(self._writing, self._write)
        timer = self._loop.call_later(seconds, self._expire)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._stop()  # its answer would be taken for that to the next question
            raise
        finally:
            timer.cancel()
            self._answer = None

    def _write(self) -> None:
        with suppress(OSError):  # it has ended, which `_read` will find behind what it said before
            self._unsent = self._unsent[write_some(self._writing, self._unsent) :]
            if self._unsent:
                return
        self._loop.remove_writer(self._writing)

    def _read(self) -> None:
        try:
            part = os.read(self._reading, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        if part.endswith(b"\n"):
            self._set_answer(bytes(self._received))
        elif not part or len(self._received) > self._most_answer:
            self._stop()

    def _expire(self) -> None:
        self._read()  # the answer may have come while the program was busy
        self._set_answer(None)

    def _set_answer(self, answer: bytes | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
