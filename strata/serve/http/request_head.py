"""A request's method, path and headers, as the gate reads them."""

from __future__ import annotations

import base64
import binascii
import re
import uuid

from starlette.types import Scope

from strata.serve.http.errors import ApiError
from strata.serve.http.http_protocol import HEAD_LIMIT, MAX_HEADERS, head_too_large
from strata.serve.http.validation import shown

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,18}")
# Two of these in one request, and two readers could understand it differently.
_SINGLE = (b"host", b"authorization", b"content-length", b"transfer-encoding", b"origin")


class RequestHead:
    """host: the Host header, in lower case, with its port. origin: of the page that sent the request, None if none did.

    request_id: the client's own x-request-id if it is a plain word, else a new one.
    """

    def __init__(self, scope: Scope) -> None:
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._first: dict[bytes, bytes] = dict(reversed(self._headers))
        self._target_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.host = self.text(b"host").lower()
        self.origin = self.text(b"origin").lower() or None
        asked = self.text(b"x-request-id")
        self.request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"

    def text(self, name: bytes) -> str:
        """A header's value, the first if there are several; empty if there is none."""
        return self._first.get(name, b"").decode("latin-1")

    def check(self) -> None:
        """Raises ApiError for headers that are too large, wrong, or ambiguous."""
        size = self._target_bytes + sum(len(name) + len(value) + len(": \r\n") for name, value in self._headers)
        if size > HEAD_LIMIT or len(self._headers) > MAX_HEADERS:
            raise head_too_large()
        names = [name for name, _ in self._headers]
        for name in _SINGLE:
            if names.count(name) > 1:
                raise ApiError(400, f"the header {name.decode()} is there more than once", code="invalid_http")
        length = self.text(b"content-length")
        if length and not _LENGTH.fullmatch(length):
            raise ApiError(400, f"Content-Length {shown(length)} is not a number of bytes", code="invalid_http")
        if length and self.chunked:
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other", code="invalid_http")

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, None if they are not known ahead."""
        length = self.text(b"content-length")
        return int(length) if length else None

    @property
    def chunked(self) -> bool:
        return bool(self.text(b"transfer-encoding"))

    @property
    def expects_continue(self) -> bool:
        return bool(self.text(b"expect"))

    @property
    def host_name(self) -> str:
        """Host without its port; an IPv6 address in its brackets."""
        return re.sub(r":\d*$", "", self.host)

    @property
    def same_origin(self) -> bool:
        """No page sent this, or one of this very server."""
        return self.origin is None or self.origin.partition("://")[2] == self.host

    @property
    def is_preflight(self) -> bool:
        """A browser asks whether a page of another origin may send a request."""
        return self.method == "OPTIONS" and bool(self.text(b"access-control-request-method"))

    def credentials(self) -> tuple[str, str]:
        """The scheme of the Authorization header, and the key in it: a bearer token, or a browser's password."""
        scheme, _, value = self.text(b"authorization").partition(" ")
        scheme = scheme.lower()
        if scheme == "basic":
            try:
                return scheme, base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return scheme, ""
        return scheme, value.strip() if scheme == "bearer" else ""
