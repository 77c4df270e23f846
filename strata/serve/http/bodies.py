"""The bodies of requests: read within bounds of size and time, decoded, and held against what all may take together."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from strata.serve.http.errors import ApiError
from strata.serve.http.http_protocol import BODY_SECONDS
from strata.serve.http.request_head import RequestHead
from strata.serve.http.validation import shown

MAX_TOGETHER = 128 * 1024 * 1024  # bytes of the bodies of all requests that an API process has
_GZIP = 16 + zlib.MAX_WBITS  # with its header, as zlib calls it


class Disconnected(Exception):
    """The client has left before its request was complete."""


class Bodies:
    """Reads bodies of at most `limit` bytes each. One caller's may take as much together as is left for others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @contextmanager
    def of_one(self) -> Iterator[Body]:
        """A request, for as long as it takes."""
        body = Body(self)
        try:
            yield body
        finally:
            self._held[body.caller] -= body.held
            if not self._held[body.caller]:
                del self._held[body.caller]

    def hold(self, caller: str, size: int) -> None:
        """Raises ApiError (503) if there is no room for so many bytes more."""
        if self._held[caller] + size > MAX_TOGETHER - self._held.total():
            message = "the requests that this server has hold as much as it can take: try again later"
            raise ApiError(503, message, code="bodies_full", headers={"retry-after": "1"})
        self._held[caller] += size

    @property
    def limit(self) -> int:
        return self._limit


class Body:
    """The body of one request. caller: whose it is, once it is read. held: bytes that it takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.caller = ""
        self.held = 0

    async def read(self, caller: str, head: RequestHead, receive: Receive) -> bytes | None:
        """The body, decoded; None if the request has none.

        Raises ApiError: 413 if it is too large, 415 for an encoding that is not read here, 408 if it takes too long,
        400 if it is not what it says, 503 if there is no room for it. Raises Disconnected if it does not end.
        """
        self.caller = caller
        limit, length = self._bodies.limit, head.content_length
        if length is not None and length > limit:
            raise _too_large(head, limit)
        if not length and not head.chunked:
            return None
        encoding = head.text(b"content-encoding").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            message = f"a body in the Content-Encoding {shown(encoding)} is not read here: send it as it is, or as gzip"
            raise ApiError(415, message, code="unsupported_encoding")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read_raw(head, receive)
        except TimeoutError:
            message = f"the body took over {BODY_SECONDS:g} s"
            raise ApiError(408, message, code="body_timeout", headers={"connection": "close"}) from None
        return body if encoding in ("", "identity") else self._unzipped(head, body)

    async def _read_raw(self, head: RequestHead, receive: Receive) -> bytes:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            if len(body) + len(part) > self._bodies.limit:
                raise _too_large(head, self._bodies.limit)
            self._hold(len(part))
            body += part
            more = message.get("more_body", False)
        return bytes(body)

    def _unzipped(self, head: RequestHead, body: bytes) -> bytes:
        limit = self._bodies.limit
        reader = zlib.decompressobj(_GZIP)
        try:
            text = reader.decompress(body, limit + 1)
        except zlib.error:
            text, whole = b"", False
        else:
            whole = reader.eof and not reader.unused_data
        if len(text) > limit:
            raise _too_large(head, limit)
        if not whole:
            raise ApiError(400, "the body is not whole gzip, as its Content-Encoding says", code="invalid_encoding")
        self._hold(len(text))
        return text

    def _hold(self, size: int) -> None:
        self._bodies.hold(self.caller, size)
        self.held += size


def _too_large(head: RequestHead, limit: int) -> ApiError:
    # Who waits for "100 Continue" will not send the body now; others will, and what comes is thrown away.
    headers = {"connection": "close"} if head.expects_continue else {}
    return ApiError(413, f"the body is over {limit} bytes", code="body_too_large", headers=headers)
