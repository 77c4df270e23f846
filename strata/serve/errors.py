"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}`, always all four."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What a request is answered with when it cannot be served.

    param: the field at fault, as a path ("messages[0].content"). code: a short name for programs to tell apart.
    headers: sent with the response, such as Retry-After (seconds).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
