"""/health: is the engine alive; /ready: may requests be sent here."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request, Response

from strata.serve.http.errors import ApiError
from strata.serve.http.json_route import api_router
from strata.serve.schema.base import ReplyModel, json_response
from strata.serve.state import server_of

router = api_router("health")


class Health(ReplyModel):
    status: str


@router.get("/health", response_model=Health)
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 once it is dead."""
    return _answer(server_of(request).require_alive, "ok")


@router.get("/ready", response_model=Health)
async def ready(request: Request) -> Response:
    """200 when the model is loaded and new requests are taken; 503 while the server drains or its engine is dead."""
    return _answer(server_of(request).require_serving, "ready")


def _answer(check: Callable[[], None], status: str) -> Response:
    try:
        check()
    except ApiError as error:  # answered here, since it turns away no request
        return error.response()
    return json_response(Health(status=status))
