"""HTTP/1.1 for a load generator: an answer's body is handed over as it comes.

A chunk of a stream costs about 7 us of CPU, its JSON included, where httpx takes 43 without: one core of client must
keep up with a server that streams 20,000 chunks a second and more, or it would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

# A server closes connections that stay idle (uvicorn after 5 s); one that is about to be closed must not be taken.
MAX_IDLE = 2.0

OnBody = Callable[[int, bytes], None]


class ConnectionCut(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


class HttpClient:
    """Connections to one server, kept for reuse. `url`: http or https, host and port; `key`: sent as a bearer token.

    Close it when done.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"--url must be like http://127.0.0.1:8000 (no path), got {url!r}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        try:
            self._port = parts.port or (443 if self._tls else 80)
        except ValueError as error:
            raise ValueError(f"--url {url}: {error}; give a port from 1 to 65535") from None
        authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._headers = f"host: {parts.netloc}\r\n{authorization}content-type: application/json\r\n"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """The status of a request, after `on_body(status, part)` has had all of the answer.

        Raises OSError without a connection, ConnectionCut if the answer is not complete. Cancelling it leaves the
        request: the connection is closed.
        """
        return await self._exchange("POST", path, body, on_body)

    async def call(self, path: str, value: Any = None) -> tuple[int, bytes]:
        """Status and body: of a GET, or of a POST of `value` as JSON. Raises as `post` does."""
        parts: list[bytes] = []
        method, body = ("GET", b"") if value is None else ("POST", json.dumps(value).encode())
        status = await self._exchange(method, path, body, lambda _, part: parts.append(part))
        return status, b"".join(parts)

    def close(self) -> None:
        for connection in self._open:
            connection.abort()
        self._open.clear()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, on_body: OnBody) -> int:
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        connection = await self._connection()
        try:
            status = await connection.exchange(head.encode() + body, on_body)
        except BaseException:
            connection.abort()
            self._open.discard(connection)
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()
            self._open.discard(connection)
        return status

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.monotonic() - connection.idle_since < MAX_IDLE:
                return connection
            connection.abort()
            self._open.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls or None)
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection: `exchange` sends a request and waits for the whole answer; then the next may be sent."""

    def __init__(self) -> None:
        self.reusable = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._answered: asyncio.Future[int] | None = None
        self._on_body: OnBody
        self._status = 0

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        if self._transport.is_closing():
            raise ConnectionCut("the connection was closed before the request was sent")
        self.reusable = False
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def abort(self) -> None:
        self.reusable = False
        self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of no such class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the connection was cut: {error}" if error else "the server closed the connection")

    # the parser's side

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self._on_body(self._status, part)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self.idle_since = time.monotonic()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(self._status)

    def _fail(self, reason: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionCut(reason))
