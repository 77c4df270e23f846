"""/health: is the engine alive; /ready: may requests be sent here."""

from __future__ import annotations

from fastapi import Request

from strata.serve.errors import ApiError
from strata.serve.json_route import api_router
from strata.serve.schema_base import ReplyModel
from strata.serve.state import server_of

router = api_router("health")


class Health(ReplyModel):
    status: str


@router.get("/health")
async def health(request: Request) -> Health:
    """200 while the engine lives, 503 once it is dead."""
    state = server_of(request)
    if not state.client.alive:
        raise ApiError(503, "the engine is dead; restart the server", code="engine_dead")
    return Health(status="ok")


@router.get("/ready")
async def ready(request: Request) -> Health:
    """200 when the model is loaded and new requests are taken; 503 while the server drains or its engine is dead."""
    state = server_of(request)
    state.require_serving()
    return Health(status="ready")
