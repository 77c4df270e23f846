"""HTTP/1.1 as uvicorn speaks it with httptools, bounded where a client could hold memory or connections for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from strata.serve.http.errors import ApiError

HEAD_LIMIT = 16 * 1024  # bytes of request line and headers
MAX_HEADERS = 100
HEAD_SECONDS = 10.0  # from a connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 30.0  # from there to the end of its body
STALL_SECONDS = 60.0  # in which a client must take some of what waits for it
# A client that still sends when its connection is closed may lose the answer. So bytes are thrown away for a while: of
# a body whose request has its answer, and after a refusal here.
DISCARD_LIMIT = 4 * 1024 * 1024
LINGER_LIMIT = 512 * 1024
LINGER_SECONDS = 2.0
MAX_PIPELINED = 16  # requests that may follow one that is being answered
_GRACE_SECONDS = 5.0  # by which the application may be late with its own answer to a body that stalls


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are too long, whose request does not come to its end in time, or whose client
    does not read.

    Of a body that comes in chunks, what is not the body itself (sizes, extensions, trailers) may be 16 KiB and as much
    as the body; trailers are thrown away. What is refused here, where there is no request yet that the application
    could answer, gets OpenAI's error body too.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._begin_request()
        self._refusal: ApiError | None = None
        self._refused = False
        self._started: RequestResponseCycle | None = None
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)
        self._stall: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._end_stall()
        self._disconnect(self._started)  # uvicorn tells the last one alone
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discard(len(data), LINGER_LIMIT)
            return
        self._received += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head and self._received > HEAD_LIMIT:
            self._refuse(head_too_large())
        elif self._received - self._body > 2 * HEAD_LIMIT + self._body:
            self._refuse(ApiError(400, "the body comes in more framing than content", code="invalid_http"))

    def eof_received(self) -> None:
        """The client sends no more. One that waits for an answer has left, as far as can be known; should it be there,
        it learns why it gets none.
        """
        if self._refused:
            pass
        elif not self._in_head:
            message = f"the body ends too soon, after {self._body} bytes"
            self._refuse(ApiError(400, message, code="incomplete_body"))
        elif self._received:
            self._refuse(ApiError(400, "the request ends within its headers", code="invalid_http"))
        elif self._answering:
            message = "the connection was closed for sending before the answer came: keep it open until then"
            self._refuse(ApiError(400, message, code="half_closed"))
        super().eof_received()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._started = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._set_deadline(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer
            return
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) == MAX_HEADERS:
            self._stop_reading(head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._set_deadline(BODY_SECONDS + _GRACE_SECONDS)
        if len(self.pipeline) == MAX_PIPELINED:
            self._stop_reading(ApiError(400, f"over {MAX_PIPELINED} requests came at once", code="invalid_http"))
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[assignment, method-assign]

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if self.cycle.response_complete:
            self._discard(len(body), DISCARD_LIMIT)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True  # of the next request on this connection
        self._begin_request()
        self._deadline.cancel()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes less than is written; whoever writes waits, and holds its place, but not forever."""
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _begin_request(self) -> None:
        self._received = 0  # bytes, since the last request was complete
        self._head = 0  # of which are the request line and headers
        self._body = 0  # of which are the body
        self._discarded = 0  # of which came after the answer

    def _discard(self, size: int, most: int) -> None:
        self._discarded += size
        if self._discarded > most:
            self.transport.close()

    def _count_head(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_LIMIT:
            self._stop_reading(head_too_large())

    def _stop_reading(self, refusal: ApiError) -> None:
        """Leave the rest of what has come unread: the parser answers any exception by `send_400_response`."""
        self._refusal = refusal
        raise refusal

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def send_400_response(self, msg: str) -> None:
        invalid = ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http")
        self._refuse(self._refusal or invalid)

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
        """Answer in place of the application, unless an answer is under way or the last request has its own; close."""
        if self.cycle is None or self.cycle.response_complete:
            unanswered = self._in_head
        else:
            unanswered = not self.cycle.response_started and not self.pipeline
        if unanswered:
            body = msgspec.json.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
            self._tell(error)
        self._refused = True
        self._discarded = 0
        self._disconnect(self.cycle)
        self._disconnect(self._started)
        self._set_linger()

    def _tell(self, error: ApiError) -> None:
        """What is done about a refusal besides answering it: nothing here."""

    def _set_linger(self) -> None:
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _disconnect(self, cycle: RequestResponseCycle | None) -> None:
        """Tell whoever answers a request that nobody reads the answer."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()


def bounded(refused: Callable[[ApiError], None]) -> type[BoundedHttpProtocol]:
    """The protocol of a server that wants to be told what was refused here."""

    class Bounded(BoundedHttpProtocol):
        def _tell(self, error: ApiError) -> None:
            refused(error)

    return Bounded


def head_too_large() -> ApiError:
    return ApiError(431, f"the request line and headers are over {HEAD_LIMIT} bytes", code="headers_too_large")


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Awaitable[None]]:
    """How HTTP/1.0 is answered: a body whose length is not known ends with the connection."""
    send = cycle.send
    until_close = False

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal until_close
        if message["type"] == "http.response.start":
            until_close = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if until_close:
                cycle.chunked_encoding = False
        elif until_close and message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
