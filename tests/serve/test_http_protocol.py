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
from starlette.types import Receive, Scope, Send

from strata.serve.http import gate, http_protocol
from tests.serve.test_gate import Server


@contextmanager
def listening(server: Server) -> Iterator[Callable[[], socket.socket]]:
    """uvicorn with the bounded protocol in a thread; gives what connects to it."""
    config = uvicorn.Config(
        server.gate, http=http_protocol.BoundedHttpProtocol, ws="none", lifespan="off", log_config=None, port=0
    )
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        address = listener.getsockname()
        try:
            while not running.started:
                time.sleep(0.01)
            yield lambda: socket.create_connection(address, timeout=10)
        finally:
            running.should_exit = True
            thread.join()


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and what was read until the server closed."""
    with connection.makefile("rb") as stream:
        whole = stream.read()
    return (int(whole.split(b" ", 2)[1]) if whole else 0), whole


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
    with listening(Server()) as connect:
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
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    with listening(Server()) as connect:
        for beginning in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with connect() as connection:
                connection.sendall(beginning)
                assert read_answer(connection) == (0, b"")


def test_a_stalled_body_gets_408_and_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
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
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.5)
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
            assert ended.wait(10)
        received = 0
        with suppress(ConnectionResetError):
            while piece := connection.recv(1_000_000):
                received += piece.count(b"~")
                time.sleep(0.05)
        assert (received == size) is reads
