"""HTTP on a real socket: what a client sends wrong, too slowly, or without end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.serve.http import bodies, http_protocol
from strata.serve.http.errors import ApiError
from tests.serve.http.test_gate import KEYS, Server


@contextmanager
def listening(
    server: Server, refused: Callable[[ApiError], None] = lambda error: None
) -> Iterator[Callable[[], socket.socket]]:
    """uvicorn with the bounded protocol in a thread; gives what connects to it."""
    protocol = http_protocol.bounded(refused)
    config = uvicorn.Config(server.gate, http=protocol, ws="none", lifespan="off", log_config=None, port=0)
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        address = listener.getsockname()
        try:
            while not running.started:
                time.sleep(0.01)
            yield lambda: socket.create_connection(address, timeout=60)
        finally:
            running.should_exit = True
            thread.join()


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and what was read until the server closed."""
    with connection.makefile("rb") as stream:
        whole = stream.read()
    return (int(whole.split(b" ", 2)[1]) if whole else 0), whole


def code_of(answer: bytes) -> str:
    """Of the error that is its body."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


def waiting() -> tuple[threading.Event, ASGIApp]:
    """An application that answers nothing, and whether it has heard that its client has left."""
    left = threading.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    return left, waits


def test_headers_that_never_end_are_cut_off_early() -> None:
    with listening(Server()) as connect, connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nx-a: ")
        sent = 0
        with suppress(OSError):  # the server has closed
            while sent < 10_000_000:
                sent += connection.send(b"a" * 1000)
                time.sleep(0.0002)
        assert sent < 1_000_000


def test_long_headers_get_431_and_garbage_400_in_openais_shape() -> None:
    told: list[ApiError] = []
    with listening(Server(), told.append) as connect:
        post = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        for request, status, code in [
            (post + b"x-a: " + b"a" * 17_000 + b"\r\n\r\n", 431, "headers_too_large"),
            (post + b"x-a: " + b"a" * 17_000, 431, "headers_too_large"),
            (b"\x16\x03\x01 not http\r\n\r\n", 400, "invalid_http"),
            (post + b"Content-Length: abc\r\n\r\n", 400, "invalid_http"),
            (post + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http"),
        ]:
            with connect() as connection:
                connection.sendall(request)
                got, answer = read_answer(connection)
            assert got == status
            assert code_of(answer) == code
            assert [(one.status, one.code) for one in told] == [(status, code)], "once"
            told.clear()


FLOODS = {
    "a trailer without end": (b"0\r\nx-a: ", b"a" * 65_536),
    "trailers without end": (b"0\r\n", b"x-a: b\r\n" * 8192),
    "chunks of one byte": (b"", b"1;" + b"x" * 64 + b"\r\na\r\n"),
    "a chunk's extension without end": (b"1;", b"x" * 65_536),
    "a body without end": (b"", b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("refused", [True, False])
def test_what_a_connection_may_send_is_bounded(flood: str, refused: bool) -> None:
    """Also after a refusal at the head, when nobody reads the body any more."""
    first, more = FLOODS[flood]
    more *= max(1, 65_536 // len(more))
    with listening(Server(KEYS if refused else None)) as connect, connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + first)
        sent = 0
        with suppress(OSError):  # the server has closed
            while sent < 40_000_000:
                sent += connection.send(more)
        assert sent < 16_000_000  # the system's buffers hold some of it


def test_trailers_are_read_and_thrown_away() -> None:
    with listening(Server()) as connect, connect() as connection:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head + b"5\r\nhello\r\n0\r\nauthorization: Bearer x\r\nHost: evil\r\n\r\n")
        status, answer = read_answer(connection)
        assert status == 200
        assert b'"body": 5,' in answer


def test_many_small_headers_and_many_requests_at_once_are_cut_off() -> None:
    with listening(Server()) as connect:
        with connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 50_000 + b"\r\n")
            status, answer = read_answer(connection)
            assert (status, answer.count(b"HTTP/1.1 ")) == (431, 1)
        with connect() as connection:
            with suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000)
            answers = b""
            with suppress(OSError):
                while part := connection.recv(1_000_000):
                    answers += part
            assert answers.count(b"HTTP/1.1 200") < 1000


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HT", "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Le", "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n", "incomplete_body"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhello", "incomplete_body"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "incomplete_body"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "invalid_http"),
    ],
)
def test_a_request_that_ends_too_soon_is_told_so(sent: bytes, code: str) -> None:
    with listening(Server()) as connect, connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        status, answer = read_answer(connection)
        assert (status, code_of(answer), answer.count(b"HTTP/1.1 400")) == (400, code, 1)


def test_one_who_sends_no_more_while_an_answer_is_awaited_is_told_why_there_is_none() -> None:
    left, waits = waiting()
    with listening(Server(app=waits)) as connect, connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.1)
        connection.shutdown(socket.SHUT_WR)
        status, answer = read_answer(connection)
        assert (status, code_of(answer)) == (400, "half_closed")
        assert left.wait(60)


def test_requests_that_were_begun_hear_that_the_client_has_left_though_others_follow_them() -> None:
    left, waits = waiting()
    with listening(Server(app=waits)) as connect:
        with connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
            time.sleep(0.1)
        assert left.wait(60)


def test_http_1_0_is_answered_without_chunks() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with listening(Server(app=stream)) as connect:
        for version, chunked in ((b"1.0", False), (b"1.1", True)):
            with connect() as connection:
                connection.sendall(b"GET / HTTP/" + version + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                _, answer = read_answer(connection)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert (b"transfer-encoding: chunked" in head) is chunked
            assert (body == b"data: x\n\n" * 3) is not chunked


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    with listening(Server()) as connect:
        for beginning in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with connect() as connection:
                connection.sendall(beginning)
                assert read_answer(connection) == (0, b"")


def test_a_stalled_body_gets_408_and_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    with listening(Server()) as connect, connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nbeg")
        assert read_answer(connection)[0] == 408


def test_a_refused_body_is_thrown_away_and_the_connection_serves_on() -> None:
    with listening(Server(body_limit=1000)) as connect, connect() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n")
        connection.sendall(b"x" * 300_000)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        _, whole = read_answer(connection)
        assert whole.count(b"HTTP/1.1 413") == 1
        assert whole.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("reads", [False, True])
def test_only_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 2.0)
    size, ended = 12_000_000, threading.Event()

    async def long_answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(size // 50_000):
            await send({"type": "http.response.body", "body": b"~" * 50_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    with listening(Server(app=long_answer)) as connect, connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not reads:
            assert ended.wait(60)
        received = 0
        with suppress(ConnectionResetError):
            while piece := connection.recv(1_000_000):
                received += piece.count(b"~")
                time.sleep(0.05)
        assert (received == size) is reads
