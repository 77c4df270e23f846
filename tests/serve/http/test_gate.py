"""The gate around an application that answers everything, asked in memory."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from base64 import b64encode
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.serve.http import bodies
from strata.serve.http.bodies import MAX_TOGETHER
from strata.serve.http.errors import ApiError
from strata.serve.http.gate import Gate, is_loopback
from strata.serve.http.keys import KeyHash, KeyRing
from strata.serve.processes.drain import Drain
from strata.serve.settings import ServeSettings

KEYS = KeyRing([KeyHash.of("alice", "sk-alice"), KeyHash.of("bob", "sk-bob")])
ALICE = ("authorization", "Bearer sk-alice")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what reached it."""
    message = await receive()
    told = {
        "body": len(message["body"]),
        "caller": scope["state"]["caller"].name,
        "salt": scope["state"]["caller"].salt,
        "id": scope["state"]["request_id"],
    }
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in messages[1:])
        self.json: Any = json.loads(body) if body else None

    @property
    def code(self) -> str:
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        code: str = self.json["error"]["code"]
        return code


class Server:
    """A gate to be asked in memory."""

    def __init__(self, keys: KeyRing | None = None, app: ASGIApp = echo, **settings: Any) -> None:
        self.drain = Drain()
        self.rejections: list[str] = []
        self.entered: list[str] = []
        self.gate = Gate(
            app,
            ServeSettings("m", ("m",), **settings),
            keys or KeyRing([]),
            self.drain,
            lambda caller: self.entered.append(caller.name),
            self.rejections.append,
        )

    def ask(
        self,
        *headers: tuple[str, str],
        method: str = "POST",
        path: str = "/v1/x",
        pieces: tuple[bytes, ...] = (),
        port: int = 8000,
    ) -> Answer:
        given = dict(headers)
        given.setdefault("host", "localhost:8000")
        listed = [*given.items(), *(pair for pair in headers if given[pair[0]] != pair[1])]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "server": ("127.0.0.1", port),
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in listed],
        }
        messages: list[Message] = []
        waiting = list(pieces)

        async def receive() -> Message:
            if not waiting and pieces:
                await asyncio.sleep(60)  # the client stalls
            piece = waiting.pop(0) if waiting else b""
            return {"type": "http.request", "body": piece, "more_body": bool(pieces) and piece != b""}

        async def send(message: Message) -> None:
            messages.append(message)

        asyncio.run(self.gate(scope, receive, send))
        return Answer(messages)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/metrics/", "//metrics", "/metrics/x", "/v1/completions"]
)
def test_the_port_of_metrics_has_metrics_alone_and_needs_no_key(path: str) -> None:
    server = Server(KEYS, metrics_port=9000)
    read = server.ask(method="GET", path="/metrics", port=9000)
    assert (read.status, read.json["caller"]) == (200, "anonymous")
    for headers in ((), (ALICE,)):
        refused = server.ask(*headers, method="GET", path=path, port=9000)
        assert (refused.status, refused.code) == (404, "unknown_url")
    assert server.ask(method="GET", path="/metrics").status == 401
    assert server.ask(("host", "evil.example"), method="GET", path="/metrics", port=9000).status == 403
    assert Server(KEYS).ask(method="GET", path="/metrics", port=9000).status == 401


CHUNKED = ("transfer-encoding", "chunked")


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models", "/docs", "/health/", "//health", "/healthz"])
def test_every_path_needs_a_key_but_health_and_ready(path: str) -> None:
    server = Server(KEYS)
    answer = server.ask(method="GET", path=path)
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert server.ask(ALICE, path=path).status == 200
    assert server.rejections == ["unauthorized"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_and_ready_are_open(path: str) -> None:
    assert Server(KEYS).ask(method="GET", path=path).status == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "sk-alice",
        "Bearer",
        "Bearer ",
        "Bearer sk-alic",
        "Bearer sk-alice2",
        "Basic sk-alice",
        "Token sk-alice",
        "Bearer \xff",
    ],
)
def test_a_wrong_key_is_refused(value: str) -> None:
    assert Server(KEYS).ask(("authorization", value)).status == 401


def test_a_key_names_its_caller_and_salt() -> None:
    server = Server(KEYS)
    alice, bob = server.ask(ALICE).json, server.ask(("authorization", "bearer sk-bob")).json
    assert (alice["caller"], bob["caller"]) == ("alice", "bob")
    assert alice["salt"] != bob["salt"]
    assert Server().ask().json["caller"] == "anonymous"


def test_a_browser_is_asked_for_the_key_as_a_password() -> None:
    server = Server(KEYS)
    asked = server.ask(("accept", "text/html,*/*"), method="GET", path="/")
    assert asked.headers["www-authenticate"].startswith("Basic ")
    basic = ("authorization", "Basic " + b64encode(b"anyone:sk-bob").decode())
    assert server.ask(basic).json["caller"] == "bob"
    # A browser adds a password to what a foreign page asks of this server, too.
    outside = Server(KEYS, host="0.0.0.0")
    assert outside.ask(basic, ("origin", "http://localhost:8000")).status == 200
    assert outside.ask(basic, ("origin", "https://evil.example")).code == "foreign_origin"
    assert outside.ask(ALICE, ("origin", "https://a-client.example")).status == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "my.box"]
)
def test_own_hosts_are_served_on_loopback(host: str) -> None:
    assert Server(allowed_hosts=("my.box",)).ask(("host", host)).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "localhost@evil", "", "[::1"]
)
def test_foreign_hosts_are_refused_on_loopback(host: str) -> None:
    server = Server(KEYS)
    answer = server.ask(("host", host), ALICE)
    assert (answer.status, answer.code) == (403, "foreign_host")
    assert server.ask(("host", host), path="/health").status == 403
    assert Server(KEYS, host="0.0.0.0").ask(("host", host), ALICE).status == 200


def test_the_own_page_and_allowed_origins_may_ask() -> None:
    server = Server(KEYS, allowed_origins=("https://app.example",))
    assert "access-control-allow-origin" not in server.ask(ALICE, ("origin", "http://localhost:8000")).headers
    allowed = ("origin", "https://app.example")
    assert server.ask(ALICE, allowed).headers["access-control-allow-origin"] == "https://app.example"
    assert server.ask(allowed).headers["access-control-allow-origin"] == "https://app.example"  # the 401 can be read
    preflight = (("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,x-a"))
    answer = server.ask(allowed, *preflight, method="OPTIONS")
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == "authorization,x-a"
    assert server.ask(("origin", "https://evil.example"), *preflight, method="OPTIONS").status == 403


def test_cors_is_off_unless_origins_are_listed() -> None:
    answer = Server(host="0.0.0.0").ask(("origin", "https://app.example"))
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_response_has_a_request_id_and_security_headers() -> None:
    server = Server(KEYS)
    for answer in (server.ask(), server.ask(ALICE), server.ask(("host", "evil.example"))):
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert len({server.ask().headers["x-request-id"] for _ in range(5)}) == 5


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("abc-1.2_Z", True), ("a" * 129, False), ("a b", False), ("a\tb", False), ("é", False), ("", False)],
)
def test_the_clients_request_id_is_taken_if_it_is_a_plain_word(asked: str, taken: bool) -> None:
    answer = Server().ask(("x-request-id", asked))
    assert (answer.headers["x-request-id"] == asked) is taken
    assert answer.json["id"] == answer.headers["x-request-id"]


def test_a_body_over_the_limit_is_refused_by_its_length_unread() -> None:
    server = Server(body_limit=100)
    answer = server.ask(("content-length", "101"), pieces=())
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert "connection" not in answer.headers
    assert server.ask(("content-length", "101"), ("expect", "100-continue")).headers["connection"] == "close"


def test_a_body_over_the_limit_is_refused_as_it_streams() -> None:
    server = Server(body_limit=100)
    assert server.ask(CHUNKED, pieces=(b"x" * 60, b"x" * 40, b"")).json["body"] == 100
    assert server.ask(CHUNKED, pieces=(b"x" * 60, b"x" * 41)).status == 413  # the rest was not waited for
    assert server.rejections == ["too_large"]


GZIP = ("content-encoding", "gzip")


def test_a_body_in_gzip_is_unpacked_within_the_limit() -> None:
    server = Server(body_limit=1000)
    assert server.ask(CHUNKED, GZIP, pieces=(gzip.compress(b"x" * 1000), b"")).json["body"] == 1000
    bomb = gzip.compress(b"x" * 1001)
    assert len(bomb) < 100
    assert server.ask(CHUNKED, GZIP, pieces=(bomb, b"")).code == "body_too_large"
    assert server.ask(CHUNKED, ("content-encoding", "identity"), pieces=(b"x" * 7, b"")).json["body"] == 7


def test_what_unpacking_may_take_is_bounded() -> None:
    bomb = gzip.compress(bytes(300_000_000))
    tracemalloc.start()
    assert Server().ask(CHUNKED, GZIP, pieces=(bomb, b"")).status == 413
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


WHOLE = gzip.compress(b"hello", mtime=0)


LENGTHS = ("-1", "1e3", "0x10", "ten", "²", "9" * 30)
ENCODINGS = ("br", "zstd", "deflate", "gzip, gzip")
ORIGINS = ("https://evil.example", "null", "http://localhost:3000", "http://localhost:8000.evil.example", "http://[")


@pytest.mark.parametrize(
    ("headers", "pieces", "status", "code"),
    [
        *(([("content-length", length)], (), 400, "invalid_http") for length in LENGTHS),
        *(([CHUNKED, GZIP], (body, b""), 400, "invalid_encoding") for body in (b"none", WHOLE[:-3], WHOLE + b"more")),
        *(([CHUNKED, ("content-encoding", name)], (b"x", b""), 415, "unsupported_encoding") for name in ENCODINGS),
        *(([("origin", origin)], (), 403, "foreign_origin") for origin in ORIGINS),
        ([("x-a", "a" * 15_000)], (), 200, None),
        ([("x-a", "a" * 16_400)], (), 431, "headers_too_large"),
        ([(f"x-{number}", "a") for number in range(101)], (), 431, "headers_too_large"),
    ],
)
def test_what_a_request_has_wrong_is_refused(headers: Any, pieces: Any, status: int, code: str | None) -> None:
    answer = Server().ask(*headers, pieces=pieces)
    assert answer.status == status
    if code is not None:
        assert answer.code == code
    if status == 415:
        assert headers[-1][1] in answer.json["error"]["message"]


def test_bodies_are_bounded_together_and_none_takes_all() -> None:
    together = bodies.Bodies(limit=MAX_TOGETHER)
    with together.of_one() as alices:
        together.hold("alice", MAX_TOGETHER // 2)
        alices.caller, alices.held = "alice", MAX_TOGETHER // 2
        with pytest.raises(ApiError) as caught:
            together.hold("alice", 1)
        assert (caught.value.status, caught.value.code) == (503, "bodies_full")
        together.hold("bob", MAX_TOGETHER // 4)
    together.hold("alice", MAX_TOGETHER // 4)


def test_head_is_answered_as_get_is() -> None:
    asked: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["method"])
        await echo(scope, receive, send)

    assert Server(app=app).ask(method="HEAD").status == 200
    assert asked == ["GET"]


def test_only_what_may_cost_something_is_counted_before_its_body_is_read() -> None:
    server = Server(KEYS)
    server.ask(ALICE, method="GET")
    server.ask(method="POST")
    server.ask(ALICE, ("origin", "https://evil.example"), method="POST")
    assert server.entered == []
    server.ask(ALICE, CHUNKED, pieces=(b"x", b""))
    assert server.entered == ["alice"]


def test_ambiguous_headers_are_refused() -> None:
    for first, second in [("content-length", "5"), ("authorization", "Bearer other"), ("host", "evil.example")]:
        assert Server().ask((first, "1"), (first, second)).status in (400, 403)
    assert Server().ask(("content-length", "5"), CHUNKED).code == "invalid_http"


def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    answer = Server().ask(CHUNKED, pieces=(b"begun",))
    assert (answer.status, answer.code) == (408, "body_timeout")
    assert answer.headers["connection"] == "close"


def test_a_key_is_asked_for_before_the_body_is_read() -> None:
    assert Server(KEYS).ask(CHUNKED, pieces=(b"begun",)).status == 401  # else it would wait for the body


def test_while_it_drains_only_health_and_metrics_are_answered() -> None:
    server = Server()
    server.drain.begun = True
    answer = server.ask()
    assert (answer.status, answer.code) == (503, "draining")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
    for path in ("/health", "/ready", "/metrics"):
        assert server.ask(method="GET", path=path).status == 200


async def test_draining_waits_for_requests_under_way() -> None:
    drain = Drain()
    assert await drain.wait(0)
    with drain.request():
        assert not await drain.wait(0.01)
        waiting = asyncio.create_task(drain.wait(10))
        await asyncio.sleep(0)
    assert await waiting


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
