"""/requests/{id}: where the time of a request went, of one that runs or has ended lately."""

from __future__ import annotations

from fastapi import Request, Response

from strata.serve.client import EngineGone
from strata.serve.http.errors import ApiError
from strata.serve.http.json_route import api_router
from strata.serve.http.validation import shown
from strata.serve.schema.base import json_response
from strata.serve.schema.ledger import RequestLedgerReply, ledger_reply
from strata.serve.state import ledger_name, server_of

router = api_router("observation")


@router.get("/requests/{id}", response_model=RequestLedgerReply)
async def get_request(request: Request, id: str) -> Response:
    """Where a request's time went. id: of its answer (chatcmpl-..., cmpl-..., resp_...), or its x-request-id."""
    state = server_of(request)
    try:
        found = await state.client.ledgers(ledger_name(request, id))
    except EngineGone as error:
        raise state.engine_gone(str(error)) from None
    if not found:
        raise ApiError(
            404,
            f"there is no request {shown(id)} of this key here: it never came to the engine, or was too long ago",
            code="request_not_found",
        )
    return json_response(ledger_reply(id, state.model_name(None), state.client.ready.device, found))
