"""HTTP/1.1 as uvicorn speaks it with httptools, bounded where a client could hold memory or connections for nothing."""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from strata.serve.http.errors import ApiError

HEAD_LIMIT = 16 * 1024  # bytes of request line and headers
HEAD_SECONDS = 10.0  # from a connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 30.0  # from there to the end of its body
STALL_SECONDS = 60.0  # in which a client must take some of what waits for it
_GRACE_SECONDS = 5.0  # by which the application may be late with its own answer to a body that stalls


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are too long, whose request does not come to its end in time, or whose client
    does not read.

    What is refused here, where there is no request yet that the application could answer, gets OpenAI's error body too.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._head_bytes = 0  # received since the last request was complete
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)
        self._stall: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
            self._refuse(head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._set_deadline(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._set_deadline(BODY_SECONDS + _GRACE_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True  # of the next request on this connection
        self._head_bytes = 0
        self._deadline.cancel()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes less than is written; whoever writes waits, and holds its place, but not forever."""
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))

    @property
    def _answering(self) -> bool:
        """A request that has come completely is being answered."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _set_deadline(self, seconds: float) -> None:
        self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._answering:  # what is late is the next request, which is not even read meanwhile
            self._set_deadline(HEAD_SECONDS)
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, unless a response is under way, and close."""
        if self.cycle is None or self.cycle.response_complete:
            body = msgspec.json.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def head_too_large() -> ApiError:
    return ApiError(431, f"the request line and headers are over {HEAD_LIMIT} bytes", code="headers_too_large")
