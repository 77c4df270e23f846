"""Answers a file of requests by the server's own application, in this process and without a port."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from starlette.types import ASGIApp, Message, Scope

from strata.serve.batch_file import BatchFault, BatchRequest, BatchResults, read_requests
from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds
from strata.serve.http.app import build_app
from strata.serve.http.errors import internal_error
from strata.serve.http.keys import ANONYMOUS
from strata.serve.http.limits import Limits
from strata.serve.observe.metrics import Metrics
from strata.serve.processes.child import Child, how_it_ended
from strata.serve.processes.launch import ENGINE_MODULE
from strata.serve.processes.worker import engine_address
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from strata.text.tokenizer import Tokenizer

_ENGINE_STOP_SECONDS = 5.0
_END_SECONDS = 60.0  # in which an engine that has closed its socket ends, also on a machine with much else to do

_log = logging.getLogger("strata.serve")


class EngineNotStarted(RuntimeError):
    """The engine has ended before it was ready, and said why on standard error."""


async def run_batch(
    requests: Path,
    results: BatchResults,
    settings: ServeSettings,
    engine: Mapping[str, Any],
    ready: Callable[[], None],
    done: Callable[[], None],
) -> None:
    """Answer the requests that have no result yet, many at once; each result is written as soon as it is there.

    engine: fields of EngineConfig by name. ready: called once the engine is. done: called after each line.
    Raises EngineNotStarted, EngineGone if the engine dies, ValueError for files or a model that cannot be read, or for
    results that cannot be written.
    """
    async with engine_process(engine) as client, _application(settings, client) as app:
        ready()
        # Twice what runs at once, so that the engine never waits for this process.
        await answer_all(app, client, read_requests(requests), results, 2 * client.ready.max_sequences, done)


async def answer_all(
    app: ASGIApp,
    client: EngineClient,
    requests: Iterator[BatchRequest | BatchFault],
    results: BatchResults,
    at_once: int,
    done: Callable[[], None],
) -> None:
    """As `run_batch`, with an application that has started."""

    async def answer_some() -> None:
        for request in requests:
            if request not in results:
                await _answer(app, client, request, results)
            done()

    tasks = [asyncio.create_task(answer_some()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _answer(
    app: ASGIApp, client: EngineClient, request: BatchRequest | BatchFault, results: BatchResults
) -> None:
    if isinstance(request, BatchFault):
        results.refuse(request)
        return
    status, body = await post(app, request.url, request.body)
    if status >= 500 and not client.alive:
        # No fault of the request: the next run answers it.
        raise EngineGone(await client.wait_dead())
    results.answer(request, status, body)


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body that an application answers a JSON body with."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {"caller": ANONYMOUS, "request_id": uuid4().hex, "arrival": time.monotonic(), "body_bytes": len(body)},
    }
    asked = [body]
    answered: list[bytes] = []
    status = 500

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()  # nobody leaves
        return {"type": "http.request", "body": asked.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answered.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        _log.exception("a request failed")
        return 500, msgspec.json.encode(internal_error().body())
    return status, b"".join(answered)


@asynccontextmanager
async def engine_process(fields: Mapping[str, Any]) -> AsyncIterator[EngineClient]:
    """A client of an engine process of its own, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="strata-"))  # mode 0700
    address, ends = engine_address(folder), EngineEnds(folder)
    try:
        child = await Child.start(ENGINE_MODULE, msgspec.json.encode({"address": address, **fields}))

        def tell(ended: asyncio.Task[int]) -> None:
            if not ended.cancelled():
                ends.tell(child.pid, _how(ended.result()))

        child.ended.add_done_callback(tell)
        try:
            yield await _connect(child, address, ends)
        finally:
            await child.stop(_ENGINE_STOP_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _connect(child: Child, address: str, ends: EngineEnds) -> EngineClient:
    """A client once the engine is ready. Raises EngineNotStarted, or EngineGone for one that could not say why."""
    connecting = asyncio.create_task(EngineClient.connect(address, ends=ends))
    try:
        await asyncio.wait((connecting, child.ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not connecting.done():
            connecting.cancel()
        (client,) = await asyncio.gather(connecting, return_exceptions=True)
    if isinstance(client, EngineClient):
        return client
    await asyncio.wait((child.ended,), timeout=_END_SECONDS)  # its socket may be closed before its end is seen
    if not child.ended.done():
        raise EngineGone("the engine process does not answer")
    if child.ended.result() > 0:
        raise EngineNotStarted
    raise EngineGone(_how(child.ended.result()))


def _how(status: int) -> str:
    return f"the engine process {how_it_ended(status)}"


@asynccontextmanager
async def _application(settings: ServeSettings, client: EngineClient) -> AsyncIterator[ASGIApp]:
    """The server's application, started."""

    async def connect() -> ServerState:
        return ServerState(
            settings=settings,
            client=client,
            tokenizer=await asyncio.to_thread(Tokenizer.load, settings.model, settings.chat_template),
            limits=Limits(settings, client.ready.max_sequences),
            metrics=Metrics(settings.served_model_names[0]),
        )

    app = build_app(settings, connect)
    async with app.router.lifespan_context(app):
        yield app
