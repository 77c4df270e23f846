"""What a server tells of itself: models, whether it lives and takes requests, metrics, and ledgers of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

import strata
from strata.serve.api.answer import ledger_reply
from strata.serve.client import EngineGone
from strata.serve.http.errors import ApiError
from strata.serve.http.routes import api_router, json_response
from strata.serve.http.validation import shown
from strata.serve.schema.base import ReplyModel
from strata.serve.schema.reply import RequestLedgerReply
from strata.serve.state import ServerState, ledger_name, server_of

models_router, health_router, observation_router = map(api_router, ("models", "health", "observation"))


class ModelCard(ReplyModel):
    """max_model_len: most tokens of prompt and output together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["strata"] = "strata"
    max_model_len: int


class ModelList(ReplyModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(ReplyModel):
    version: str


@models_router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    state = server_of(request)
    return ModelList(data=[_card(state, name) for name in state.settings.served_model_names])


@models_router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    state = server_of(request)
    return _card(state, state.model_name(model))


@models_router.get("/version")
async def version() -> Version:
    return Version(version=strata.__version__)


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.created, max_model_len=state.client.ready.max_model_len)


class Health(ReplyModel):
    status: str


@health_router.get("/health", response_model=Health)
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 once it is dead."""
    return _answer(server_of(request).require_alive, "ok")


@health_router.get("/ready", response_model=Health)
async def ready(request: Request) -> Response:
    """200 when the model is loaded and new requests are taken; 503 while the server drains or its engine is dead."""
    return _answer(server_of(request).require_serving, "ready")


def _answer(check: Callable[[], None], status: str) -> Response:
    try:
        check()
    except ApiError as error:  # answered here, since it turns away no request
        return error.response()
    return json_response({"status": status})


@observation_router.get("/requests/{id}", response_model=RequestLedgerReply)
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
    return json_response(ledger_reply(state, id, found))


@observation_router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format."""
    state: ServerState = request.app.state.server
    return Response(state.metrics.render(*state.client.each_statistics), media_type=CONTENT_TYPE_PLAIN_0_0_4)
