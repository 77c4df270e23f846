"""What the handlers of one API process share; they reach it as `request.app.state.server`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fastapi import Request

from strata.serve.api.response_store import ResponseStore
from strata.serve.client import EngineClient
from strata.serve.fair_queue import AT_ONCE, FairQueue
from strata.serve.grammar import GrammarChecker
from strata.serve.http.errors import ApiError, draining
from strata.serve.http.limits import Caller, Limits
from strata.serve.http.validation import shown
from strata.serve.observe.metrics import Endpoint, Metrics
from strata.serve.routing.replicas import Replicas
from strata.serve.settings import ServeSettings
from strata.text.chat_template import AsyncTemplateRenderer
from strata.text.killable_worker import give_way
from strata.text.tokenizer import Tokenizer


@dataclass
class ServerState:
    """templates, tokenizing: who may use them next, for texts that take long.
    draining: no new requests are taken, those under way finish.

    engine_restarts: when the engine dies, another is started.
    created: when the server started (Unix time).
    """

    settings: ServeSettings
    client: EngineClient | Replicas
    tokenizer: Tokenizer
    limits: Limits
    metrics: Metrics
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    responses: ResponseStore = field(default_factory=ResponseStore)
    renderers: list[AsyncTemplateRenderer] = field(
        default_factory=lambda: [AsyncTemplateRenderer() for _ in range(AT_ONCE)]
    )
    engine_restarts: bool = False
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.templates = FairQueue(self.renderers)
        # A thread each, so that one knows its place.
        self.threads = [ThreadPoolExecutor(1, "tokenizing", give_way) for _ in range(AT_ONCE)]
        self.tokenizing = FairQueue(self.threads)

    def require_serving(self) -> None:
        """Raises ApiError (503) if no new request can be taken."""
        if self.draining:
            raise draining()
        self.require_alive()
        if isinstance(self.client, Replicas) and not self.client.takes_requests:
            raise self.engine_gone("every engine that lives is drained")

    def require_alive(self) -> None:
        """Raises ApiError (503) once the engine is dead."""
        if not self.client.alive:
            again = "; another is being started, ask again" if self.engine_restarts else ""
            raise self.engine_gone(f"{self.client.cause}{again}")

    def engine_gone(self, reason: str) -> ApiError:
        """What a request is answered with that the engine cannot finish, or begin, because it has ended."""
        if self.draining:
            message, code = "the server has shut down before this request was done", "draining"
        else:
            message, code = f"the engine is gone: {reason}", "engine_dead"
        return ApiError(503, message, code=code, headers={"Retry-After": "5"} if self.engine_restarts else {})

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; None asks for the model, whatever its name. Raises ApiError (404) if unknown."""
        names = self.settings.served_model_names
        if asked is not None and asked not in names:
            raise ApiError(
                404,
                f"the model {shown(asked)} does not exist here; this server has {', '.join(map(shown, names))}",
                param="model",
                code="model_not_found",
            )
        return asked or names[0]

    async def close(self) -> None:
        await self.client.close()
        for renderer in self.renderers:
            renderer.close()
        for thread in self.threads:
            thread.shutdown(wait=False)
        self.grammars.close()


def server_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def caller_of(request: Request) -> Caller:
    """Whose request it is, as the gate found."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def received(request: Request, endpoint: Endpoint) -> ServerState:
    """What handlers share, for one that has got a request, which is counted."""
    state = server_of(request)
    state.metrics.received(endpoint, caller_of(request).name)
    return state


def request_id_of(request: Request) -> str:
    """Its x-request-id."""
    id: str = request.scope["state"].get("request_id", "")
    return id


def ledger_name(request: Request, id: str) -> str:
    """By which the engine knows requests of the caller that are called `id`: nobody finds those of others."""
    return f"{caller_of(request).name}/{id}"
