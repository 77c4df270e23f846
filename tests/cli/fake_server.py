"""A server that answers as OpenAI's API does, or fails in the way that a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import TracebackType
from typing import Any

# How the answer to a request of a load goes wrong.
FAILURES = ("429", "error", "cut", "no [DONE]", "short", "hangs", "not JSON")


class FakeServer:
    """Use as a context manager; it serves on a thread of its own.

    failures: what goes wrong with which of the streamed requests, by their number from 0. key: what must be sent.
    gap: seconds between two tokens. arrived: when each streamed request came (`time.perf_counter`). under_way: how many
    there were then, with it. bodies: what each asked. known: the characters that are tokens, all others being one; None
    for any. max_model_len: as its list of models has it. tells_ids: whether it answers with token ids if asked, which
    are a thousand times the request's number and on.
    """

    def __init__(
        self,
        failures: dict[int, str] | None = None,
        key: str | None = None,
        gap: float = 0.0,
        tokenizes: bool = True,
        known: str | None = None,
        max_model_len: int = 1000,
        tells_ids: bool = True,
    ) -> None:
        self.failures = failures or {}
        self.key = key
        self.gap = gap
        self.tokenizes = tokenizes
        self.known = known
        self.max_model_len = max_model_len
        self.tells_ids = tells_ids
        self.arrived: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.under_way: list[int] = []
        self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = started.result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                path = head[0].split(" ")[1]
                if self.key is not None and fields.get("authorization") != f"bearer {self.key}":
                    _whole(writer, 401, {"error": {"message": "wrong key"}})
                elif path in ("/v1/completions", "/v1/chat/completions"):
                    await self._stream(writer, path, json.loads(body))
                else:
                    _whole(writer, *self._answer(path, json.loads(body or b"null")))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: str, question: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {
                "object": "list",
                "data": [{"id": "fake", "max_model_len": self.max_model_len}, {"id": "other"}],
            }
        if path == "/tokenize" and self.tokenizes:
            known = self.known or question["prompt"]
            return 200, {"tokens": [ord(one) if one in known else 0 for one in question["prompt"]]}
        if path == "/detokenize":
            return 200, {"prompt": "".join(map(chr, question["tokens"]))}
        return 404, {"error": {"message": f"no {path}"}}

    async def _stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        self.arrived.append(time.perf_counter())
        self.bodies.append(body)
        self._under_way += 1
        self.under_way.append(self._under_way)
        try:
            await self._fail_or_stream(writer, path, body, self.failures.get(len(self.arrived) - 1))
        finally:
            self._under_way -= 1

    async def _fail_or_stream(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], failure: str | None
    ) -> None:
        if failure == "429":
            _whole(writer, 429, {"error": {"message": "come again"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        tokens = body["max_tokens"] - (failure == "short")
        first_id = 1000 * len(self.arrived)
        chat = path == "/v1/chat/completions"
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(tokens):
            await asyncio.sleep(self.gap)
            choice: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
            if body.get("return_token_ids") and self.tells_ids:
                choice["token_ids"] = [first_id + number]
            _event(writer, {"choices": [choice], "usage": None})
        if failure == "cut":
            await writer.drain()
            writer.transport.abort()
            raise ConnectionError
        if failure == "hangs":
            await asyncio.Event().wait()
        if failure == "error":
            _event(writer, {"error": {"message": "the engine is gone"}})
        if failure == "not JSON":
            _chunk(writer, b"data: {\n\n")
        _event(writer, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        _chunk(writer, b"" if failure == "no [DONE]" else b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _whole(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


def _event(writer: asyncio.StreamWriter, value: Any) -> None:
    _chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
