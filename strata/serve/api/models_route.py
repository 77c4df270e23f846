"""/v1/models: what clients may ask for as `model`; /version."""

from __future__ import annotations

from typing import Literal

from fastapi import Request

import strata
from strata.serve.http.json_route import api_router
from strata.serve.schema.base import ReplyModel
from strata.serve.state import ServerState, server_of

router = api_router("models")


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


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    state = server_of(request)
    return ModelList(data=[_card(state, name) for name in state.settings.served_model_names])


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    state = server_of(request)
    return _card(state, state.model_name(model))


@router.get("/version")
async def version() -> Version:
    return Version(version=strata.__version__)


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.created, max_model_len=state.client.ready.max_model_len)
