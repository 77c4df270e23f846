"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}`, always all four."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from strata.serve.http.validation import explain_fault
from strata.serve.observe.logs import note_error
from strata.serve.observe.metrics import REJECTIONS, Rejection
from strata.serve.schema.base import ReplyModel


class _OfStatus(NamedTuple):
    """rejection: what the metrics call it, None for a fault of ours. description: in the OpenAPI document."""

    type: str
    rejection: Rejection | None = None
    description: str = ""


_INVALID = "invalid_request_error"
_STATUSES = {
    400: _OfStatus(_INVALID, "invalid", "The request is not one that can be served; `param` names the field."),
    401: _OfStatus("authentication_error", "unauthorized", "A key is missing or wrong."),
    403: _OfStatus("permission_error", "forbidden", "The key, or the page that asks, has no right to this."),
    404: _OfStatus("not_found_error", "invalid", "There is no such model or object."),
    408: _OfStatus("timeout_error", "deadline", "The request took longer than the server allows."),
    413: _OfStatus(_INVALID, "too_large", "The body is too large."),
    415: _OfStatus(_INVALID, "invalid", "The body is encoded in a way that is not read here."),
    429: _OfStatus("rate_limit_error", None, "Too many requests or tokens; come again after `Retry-After` seconds."),
    431: _OfStatus(_INVALID, "too_large"),
    500: _OfStatus("server_error", None, "The server failed."),
    503: _OfStatus("service_unavailable_error", None, "The engine is down, or the server is shutting down."),
}
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


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

    @property
    def type(self) -> str:
        return _STATUSES.get(self.status, _OfStatus(_INVALID if self.status < 500 else "server_error")).type

    @property
    def word(self) -> str:
        """Its code, or its type if it has none."""
        return self.code or self.type

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def count_rejection(scope: Scope, error: ApiError, rejected: Callable[[Rejection], None] | None = None) -> None:
    """Count in the metrics a request that is not served, or not to its end, for another cause than a fault of ours, and
    leave its code for the request's line. rejected: counts it where there is no application yet."""
    note_error(scope, error.word)
    if (reason := rejection_of(error)) is not None:
        (rejected or scope["app"].state.server.metrics.rejected)(reason)


def rejection_of(error: ApiError) -> Rejection | None:
    """What the metrics call it; None for a fault of ours."""
    if error.code == "engine_dead":
        return "engine_gone"
    if error.code in REJECTIONS:
        return error.code
    return _STATUSES[error.status].rejection if error.status in _STATUSES else None


def internal_error() -> ApiError:
    """What is said of a fault of our own: nothing that could leak."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def draining() -> ApiError:
    """What is said while the server ends."""
    return ApiError(503, "the server is shutting down; ask another one", code="draining", headers={"retry-after": "5"})


class ErrorDetail(ReplyModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ReplyModel):
    """How every request that fails is answered."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorBody, "description": told} for status, (_, _, told) in _STATUSES.items() if told},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


async def _answer_api_error(request: Request, error: ApiError) -> JSONResponse:
    count_rejection(request.scope, error)
    return error.response()


async def _answer_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    message, param, code = explain_fault(error)
    return await _answer_api_error(request, ApiError(400, message, param=param, code=code))


async def _answer_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    method, path = request.scope["method"], request.scope["path"]
    messages = {
        404: f"there is nothing at {path}; GET /openapi.json lists what there is",
        405: f"{path} does not take {method}; see GET /openapi.json",
    }
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    headers = {"allow": _methods_of_path(request)} if error.status_code == 405 else error.headers
    told = ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers)
    note_error(request.scope, told.word)
    return told.response()


def _methods_of_path(request: Request) -> str:
    """All of them; what Starlette tells are those of the first route with this path."""
    routes = request.app.routes
    scopes = ({**request.scope, "method": method} for method in _METHODS)
    return ", ".join(one["method"] for one in scopes if any(route.matches(one)[0] is Match.FULL for route in routes))


async def _answer_anything(request: Request, fault: Exception) -> JSONResponse:
    return await _answer_api_error(request, internal_error())  # starlette raises the other on, and the server logs it


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: _answer_api_error,
    RequestValidationError: _answer_invalid_request,
    HTTPException: _answer_http_exception,
    Exception: _answer_anything,
}
