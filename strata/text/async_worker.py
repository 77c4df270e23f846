"""A killable helper process (see `killable_worker`) for a program with an event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from strata.text.killable_worker import START_SECONDS, Helper, not_started, question, reply_of


class AsyncWorker:
    """One process that runs a module, started when first needed and again after a kill; it answers in order.

    What it takes too long for, or dies of, fails alone: what waits behind goes to the next process. It belongs to the
    event loop that it is first asked in.

    module: what the process runs; it calls `serve_answers`.
    deadline: seconds that one answer may take, once those before it are there.
    max_answer_bytes: bytes that one answer may have.
    """

    def __init__(self, module: str, deadline: float, max_answer_bytes: int) -> None:
        self._module, self._deadline, self._max_answer = module, deadline, max_answer_bytes
        self._helper: Helper | None = None
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[bytes | None] | None = None
        self._closed = 0  # how often

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `request` (plain JSON values), or {"error": ...} if there came none in time.

        Raises TypeError or ValueError if the request cannot be written as JSON, and RuntimeError if there is no process
        to be had.
        """
        line, closed = question(request, self._deadline), self._closed
        async with self._turn:
            answer: bytes | None = b""
            if self._helper is not None and self._helper.has_ended:
                self._stop()
            if closed == self._closed:
                answer = await self._exchange(self._helper or await self._start(), line, self._deadline)
            if closed != self._closed:
                return {"error": "it was ended"}
            if not answer:
                self._stop()
        return reply_of(answer, self._deadline)

    def close(self) -> None:
        """End the process; what it has not answered fails. A later question starts another one."""
        self._closed += 1
        self._stop()

    async def _start(self) -> Helper:
        self._helper = helper = Helper(self._module, self._max_answer)
        self._loop, closed = asyncio.get_running_loop(), self._closed
        self._loop.add_reader(helper.reading, self._read)
        if not await self._exchange(helper, b"", START_SECONDS) and closed == self._closed:  # its first words
            self._stop()
            raise not_started(self._module)
        return helper

    def _stop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        self._loop.remove_reader(helper.reading)
        self._loop.remove_writer(helper.writing)
        self._set_answer(b"")
        helper.process.kill()
        threading.Thread(target=helper.end).start()  # what had much memory takes a while to be gone

    async def _exchange(self, helper: Helper, line: bytes, seconds: float) -> bytes | None:
        """What the helper says next, after it was told a line; nothing if it has ended, None if its time is over."""
        if helper is not self._helper:
            return b""
        self._answer = self._loop.create_future()
        if not helper.tell(line):
            self._loop.add_writer(helper.writing, self._write)
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
        if self._helper is not None and self._helper.write():
            self._loop.remove_writer(self._helper.writing)

    def _read(self) -> None:
        answer = None if self._helper is None else self._helper.read()
        if answer:
            self._set_answer(answer)
        elif answer is not None:
            self._stop()

    def _expire(self) -> None:
        self._read()  # the answer may have come while the program was busy
        self._set_answer(None)

    def _set_answer(self, answer: bytes | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
