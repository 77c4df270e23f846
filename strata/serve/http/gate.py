"""What every request passes before it reaches a route: where it comes from, how large it is, whose key it bears."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_address

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.serve.http.bodies import Bodies, Disconnected
from strata.serve.http.errors import ApiError, count_rejection, draining
from strata.serve.http.keys import ANONYMOUS, KeyRing
from strata.serve.http.limits import Caller
from strata.serve.http.request_head import RequestHead
from strata.serve.http.validation import shown
from strata.serve.observe.metrics import Rejection
from strata.serve.processes.drain import Drain
from strata.serve.settings import ServeSettings

OPEN_PATHS = frozenset({"/health", "/ready"})  # all others need a key, whatever routes there are
METRICS_PATH = "/metrics"
_WHILE_DRAINING = OPEN_PATHS | {METRICS_PATH}
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{1,1024}")

# A route that sends one of these itself (the page has its own content-security-policy) keeps it.
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Gate:
    """ASGI middleware around the whole application; it refuses by default.

    It leaves `caller` (a Caller), `request_id`, `arrival` (seconds of `time.monotonic()`) and `body_bytes` in
    `scope["state"]`, hands the body on in one piece, and puts x-request-id and security headers on every response, its
    own refusals included.

    enter: counts a caller's request that may cost something, or raises ApiError; its body has not been read yet.
    rejected: called with the reason when a request is refused here.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        keys: KeyRing,
        drain: Drain,
        enter: Callable[[Caller], None],
        rejected: Callable[[Rejection], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._drain = drain
        self._bodies = Bodies(settings.body_limit)
        self._enter = enter
        self._rejected = rejected
        self._hosts: Collection[str] | None = None  # names that may be addressed; None is any
        if is_loopback(settings.host):
            names = ("localhost", "127.0.0.1", "[::1]", settings.host, *settings.allowed_hosts)
            self._hosts = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the server speaks HTTP only, not {scope['type']}")
        head = RequestHead(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = head.request_id
        state["arrival"] = time.monotonic()
        answer = self._dressed(send, head)
        with self._drain.request(), self._bodies.of_one() as reading:
            try:
                head.check()
                self._check_origin(head)
                open_port = self._is_metrics_port(scope)
                if open_port and head.path != METRICS_PATH:
                    raise ApiError(404, f"this port has {METRICS_PATH} alone", code="unknown_url")
                if head.is_preflight and head.origin in self._settings.allowed_origins:
                    await _preflight(head)(scope, receive, answer)
                    return
                state["caller"] = caller = ANONYMOUS if open_port else self._identify(head)
                self._check_draining(head)
                if head.method == "POST":
                    self._enter(caller)
                body = await reading.read(caller.name, head, receive)
            except ApiError as error:
                count_rejection(scope, error, self._rejected)
                await error.response()(scope, receive, answer)
                return
            except Disconnected:
                return
            state["body_bytes"] = len(body or b"")
            if head.method == "HEAD":  # the server leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive if body is None else _replay(body, receive), answer)

    def _is_metrics_port(self, scope: Scope) -> bool:
        """Whether the request came to the port that serves metrics without a key."""
        port = self._settings.metrics_port
        return port is not None and scope["server"][1] == port

    def _check_origin(self, head: RequestHead) -> None:
        """A page of another site must not reach a server on loopback, neither by its address nor by a name of its own.

        (DNS rebinding: the page's own name is made to lead to 127.0.0.1, so the browser takes the server for its site.)
        """
        if self._hosts is None:
            return
        if head.host_name not in self._hosts:
            known = f"this server is {', '.join(sorted(self._hosts))}; --allowed-hosts adds names"
            raise ApiError(403, f"the Host {shown(head.host)} is not served: {known}", code="foreign_host")
        if not self._origin_allowed(head):
            raise _foreign_origin(head)

    def _origin_allowed(self, head: RequestHead) -> bool:
        return head.same_origin or head.origin in self._settings.allowed_origins

    def _identify(self, head: RequestHead) -> Caller:
        if not self._keys or head.path in OPEN_PATHS:
            return ANONYMOUS
        scheme, presented = head.credentials()
        caller = self._keys.find(presented)
        if caller is None:
            message = "the API key is wrong" if presented else "an API key is needed: send Authorization: Bearer <key>"
            # A browser asks its user for a password, the key, and sends it with all that the page asks for.
            challenge = 'Basic realm="strata"' if "text/html" in head.text(b"accept") else "Bearer"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": challenge})
        if scheme == "basic" and not self._origin_allowed(head):  # browsers add these credentials by themselves
            raise _foreign_origin(head)
        return caller

    def _check_draining(self, head: RequestHead) -> None:
        if self._drain.begun and head.path not in _WHILE_DRAINING:
            raise draining()

    def _dressed(self, send: Send, head: RequestHead) -> Send:
        """`send` with the headers that every response bears."""

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower(), value) for name, value in message.get("headers", ())]
                given = {name for name, _ in headers}
                headers += [(name, value) for name, value in _SECURITY_HEADERS if name not in given]
                headers.append((b"x-request-id", head.request_id.encode()))
                if self._settings.allowed_origins:
                    headers += _cors_headers(head, self._settings.allowed_origins)
                if self._drain.begun:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        return dressed


def _foreign_origin(head: RequestHead) -> ApiError:
    message = f"pages of {shown(head.origin or '')} may not use this server; --allowed-origins lists those that may"
    return ApiError(403, message, code="foreign_origin")


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` of an application that has not yet got the body."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return whole.pop() if whole else await receive()

    return replayed


def _cors_headers(head: RequestHead, allowed: Collection[str]) -> Iterable[tuple[bytes, bytes]]:
    yield b"vary", b"Origin"
    if head.origin in allowed and head.origin is not None:
        yield b"access-control-allow-origin", head.origin.encode("latin-1")
        yield b"access-control-expose-headers", b"x-request-id, retry-after"


def _preflight(head: RequestHead) -> Response:
    asked = head.text(b"access-control-request-headers")
    headers = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else "authorization",
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=headers)
