"""Routes whose JSON bodies are read strictly, see `strata.files.strict_json`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from strata.files.strict_json import read_json
from strata.serve.http.errors import ERROR_RESPONSES


class JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def api_router(tag: str) -> APIRouter:
    """A router of API routes: strict JSON in, and all the errors that any of them may answer with documented."""
    return APIRouter(route_class=JsonRoute, tags=[tag], responses=ERROR_RESPONSES)
