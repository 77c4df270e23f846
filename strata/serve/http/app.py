"""The FastAPI application: its routes, how it answers errors, and the engine connection it holds while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

import strata
from strata.serve import page_route
from strata.serve.api import (
    chat,
    completions,
    embeddings,
    replicas_route,
    responses,
    server_routes,
    tokens_route,
)
from strata.serve.http.direct_routes import DirectRoutes
from strata.serve.http.errors import ERROR_HANDLERS
from strata.serve.http.openapi import describe
from strata.serve.observe.handlers import Handlers
from strata.serve.schema.chat_reply import ChatChunk
from strata.serve.schema.completions import Completion
from strata.serve.schema.responses_reply import ResponseStreamEvent
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    tokens_route.router,
    server_routes.models_router,
    server_routes.health_router,
    replicas_route.router,
    server_routes.observation_router,
    page_route.router,
)
STREAMED = (ChatChunk, Completion, ResponseStreamEvent)


def handlers(app: FastAPI) -> Handlers:
    """The routes that requests are counted under."""
    return Handlers([*app.routes, *(route for router in ROUTERS for route in router.routes)])


def build_app(settings: ServeSettings, connect: Callable[[], Awaitable[ServerState]]) -> FastAPI:
    """The server of one API process.

    connect: called once as the server starts, gives what handlers share; its connections are closed as the server ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.server = await connect()
        try:
            yield
        finally:
            await app.state.server.close()

    app = FastAPI(
        title="Strata",
        version=strata.__version__,
        lifespan=lifespan,
        exception_handlers=ERROR_HANDLERS,
        docs_url=None,  # FastAPI's pages load their scripts from a CDN
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,  # a redirect would repeat whatever Host the client claims
    )
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(DirectRoutes, routers=ROUTERS)
    app.openapi = lambda: describe(app, STREAMED)  # type: ignore[method-assign]
    return app
