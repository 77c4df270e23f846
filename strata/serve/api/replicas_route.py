"""/replicas: the engines of a server, for its operator, who may take one out of service and put it back."""

from __future__ import annotations

import logging
from typing import Literal

from fastapi import Request

from strata.serve.client import EngineClient
from strata.serve.http.errors import ApiError
from strata.serve.http.routes import api_router
from strata.serve.routing.replicas import LastReplica, Replicas
from strata.serve.schema.base import ReplyModel
from strata.serve.state import ServerState, caller_of, server_of

router = api_router("replicas")
_log = logging.getLogger("strata.serve")

Standing = Literal["serving", "draining", "drained", "lost"]


class ReplicaCard(ReplyModel):
    """standing: "draining" takes no new requests and finishes those it has, "drained" has finished them, "lost" has
    ended. waiting_tokens: of prompts, still to be computed. kv_usage: share of its KV pages in use. pid: of its engine.
    """

    id: int
    object: Literal["replica"] = "replica"
    standing: Standing
    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float
    pid: int | None


class ReplicaList(ReplyModel):
    object: Literal["list"] = "list"
    data: list[ReplicaCard]


@router.get("/replicas")
async def list_replicas(request: Request) -> ReplicaList:
    """How each replica stands. Its numbers are at most half a second old."""
    state = _administered(request)
    return ReplicaList(data=[_card(state, replica) for replica in range(len(_clients(state)))])


@router.post("/replicas/{replica}/drain")
async def drain_replica(request: Request, replica: int) -> ReplicaCard:
    """Let a replica finish what it has and take no new requests; 409 for the last that takes any."""
    state = _administered(request)
    _require_replica(state, replica)
    try:
        if not isinstance(state.client, Replicas):
            raise LastReplica("replica 0 is the only one: end the server instead (SIGTERM), which drains it")
        state.client.drain(replica)
    except LastReplica as error:
        raise ApiError(409, str(error), code="last_replica") from None
    _log.info("replica %d takes no new requests: %s drains it", replica, caller_of(request).name)
    return _card(state, replica)


@router.post("/replicas/{replica}/resume")
async def resume_replica(request: Request, replica: int) -> ReplicaCard:
    """Let a replica take requests again. No effect on one that does."""
    state = _administered(request)
    _require_replica(state, replica)
    if isinstance(state.client, Replicas):
        state.client.resume(replica)
    _log.info("replica %d takes requests: %s has resumed it", replica, caller_of(request).name)
    return _card(state, replica)


def _administered(request: Request) -> ServerState:
    state = server_of(request)
    if caller_of(request).name not in state.settings.admin_keys:
        message = (
            "this key may not administer the server: have --admin-keys name it (anonymous, where there are no keys)"
        )
        raise ApiError(403, message, code="not_an_admin")
    return state


def _clients(state: ServerState) -> list[EngineClient]:
    return state.client.clients if isinstance(state.client, Replicas) else [state.client]


def _require_replica(state: ServerState, replica: int) -> None:
    count = len(_clients(state))
    if not 0 <= replica < count:
        raise ApiError(404, f"there is no replica {replica}: they count from 0 to {count - 1}", code="no_such_replica")


def _card(state: ServerState, replica: int) -> ReplicaCard:
    client = _clients(state)[replica]
    (told,) = client.each_statistics
    standing: Standing = "serving" if client.alive else "lost"
    if isinstance(state.client, Replicas):
        standing = state.client.standing(replica).value
        if state.client.has_drained(replica):
            standing = "drained"
    return ReplicaCard(
        id=replica,
        standing=standing,
        running=told.running,
        waiting=told.waiting,
        waiting_tokens=told.waiting_tokens,
        kv_usage=told.kv_usage,
        pid=client.ready.pid,
    )
