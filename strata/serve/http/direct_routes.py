"""The short way to the routes that take a JSON body: past FastAPI's routing and dependencies, which they do not need.

FastAPI still has these routes: it describes them, and answers whatever else is sent to their paths. Its way to them
costs 0.1 ms of CPU a request, a quarter of all that an API process does until the first token.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from strata.files.strict_json import read_json
from strata.serve.http.errors import ERROR_HANDLERS, ApiError
from strata.serve.http.limits import AdmittedRequest, LoopShare

_SHORT = 32 * 1024  # bytes; a body that is longer may take milliseconds, or a tenth of a second


class DirectRoutes:
    """ASGI middleware that answers POST requests to every `endpoint(body: Model, request: Request) -> Response`."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
        self._share = LoopShare()
        self._routes = {route.path: found for route in routes if (found := _direct(route)) is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        try:
            if route is None:
                await self._app(scope, receive, send)
            else:
                await self._answer(route, scope, receive, send)
        finally:  # whatever became of it
            admission: AdmittedRequest | None = scope.get("state", {}).get("admission")
            if admission is not None:
                admission.close()

    async def _answer(self, route: _Route, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await self._read(route, request)
            response = await route.endpoint(body, request)
            await response(scope, receive, send)  # a stream that fails before its first event has sent nothing yet
        except (ApiError, RequestValidationError) as error:
            response = await ERROR_HANDLERS[type(error)](request, error)
            await response(scope, receive, send)

    async def _read(self, route: _Route, request: Request) -> BaseModel:
        """The body as the route takes it. Raises RequestValidationError just as FastAPI does."""
        body, state = await request.body(), request.scope["state"]
        if len(body) <= _SHORT:
            return route.read(request, body)
        async with self._share.time_slice(state["caller"].name):
            return route.read(request, body)


@dataclass(frozen=True)
class _Route:
    model: type[BaseModel]
    endpoint: Callable[[BaseModel, Request], Awaitable[Response]]

    def read(self, request: Request, body: bytes) -> BaseModel:
        value = _value(request, body)
        try:
            return self.model.model_validate(value)
        except ValidationError as error:
            faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
            raise RequestValidationError(faults, body=value) from None


def _direct(route: APIRoute) -> _Route | None:
    hints = get_type_hints(route.endpoint)
    answers = hints.pop("return", None)
    if route.methods != {"POST"} or hints.keys() != {"body", "request"}:
        return None
    if not (isinstance(answers, type) and issubclass(answers, Response)):
        return None
    return _Route(hints["body"], route.endpoint)


def _value(request: Request, body: bytes) -> Any:
    """The value of a body; its bytes, if it does not say that it is JSON; None, if it is empty."""
    if not body:
        return None
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        return body
    try:
        return read_json(body)
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": {"error": error.msg}}
        raise RequestValidationError([fault], body=error.doc) from None
