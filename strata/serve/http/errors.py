"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}`, always all four."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from strata.serve.http.validation import explain_fault
from strata.serve.observe.logs import note_error
from strata.serve.observe.metrics import Rejection

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_REJECTIONS_BY_STATUS: dict[int, Rejection] = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "invalid",
    408: "deadline",
    413: "too_large",
    415: "invalid",
    431: "too_large",
}
_REJECTIONS: dict[str, Rejection] = {
    "queue_full": "queue_full",
    "concurrency": "concurrency",
    "requests_per_minute": "requests_per_minute",
    "tokens_per_minute": "tokens_per_minute",
    "draining": "draining",
    "engine_dead": "engine_gone",
    "timeout": "deadline",
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

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def word(self) -> str:
        """Its code, or its type if it has none."""
        return self.code or self.type

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def count_rejection(scope: Scope, error: ApiError) -> None:
    """Count in the metrics a request that is not served, or not to its end, for another cause than a fault of ours, and
    leave its code for the request's line."""
    note_error(scope, error.word)
    reason = rejection_of(error)
    if reason is not None:
        scope["app"].state.server.metrics.rejected(reason)


def rejection_of(error: ApiError) -> Rejection | None:
    """What the metrics call it; None for a fault of ours."""
    return _REJECTIONS.get(error.code or "", _REJECTIONS_BY_STATUS.get(error.status))


def internal_error() -> ApiError:
    """What is said of a fault of our own: nothing that could leak."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """How every request that fails is answered."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is not one that can be served; `param` names the field."},
    401: {"model": ErrorBody, "description": "A key is missing or wrong."},
    403: {"model": ErrorBody, "description": "The key, or the page that asks, has no right to this."},
    404: {"model": ErrorBody, "description": "There is no such model or object."},
    408: {"model": ErrorBody, "description": "The request took longer than the server allows."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is encoded in a way that is not read here."},
    429: {"model": ErrorBody, "description": "Too many requests or tokens; come again after `Retry-After` seconds."},
    500: {"model": ErrorBody, "description": "The server failed."},
    503: {"model": ErrorBody, "description": "The engine is down, or the server is shutting down."},
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
    error = internal_error()
    note_error(request.scope, error.word)
    return error.response()  # starlette raises the other on, and the server logs it


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: _answer_api_error,
    RequestValidationError: _answer_invalid_request,
    HTTPException: _answer_http_exception,
    Exception: _answer_anything,
}
