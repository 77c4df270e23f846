"""Answers that may take long: streams of server-sent events, and whole ones, both ended when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from strata.serve.http.errors import ApiError, count_rejection, internal_error

DONE = b"data: [DONE]\n\n"

_log = logging.getLogger("strata.serve")
Result = TypeVar("Result")

_CLIENT_LEFT = 499  # nginx' number; nobody reads it


class EventStream(Response):
    """Server-sent events from a generator of ready bytes, each sent as one chunk.

    Nothing is sent before the first event is there, so an error until then is an answer with a status of its own. A
    later one is sent as an event `{"error": ...}`: most clients take a stream that merely ends for a whole one.
    The generator is closed when it ends and when the client leaves; while a slow client takes its time it is not asked
    for more.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events
        # The length is not known beforehand. Proxies must neither keep nor gather the events.
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_client_leaves(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        events = self._events
        try:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            await self._send_rest(scope, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await events.aclose()

    async def _send_rest(self, scope: Scope, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("a stream failed")
                error = internal_error()
            count_rejection(scope, error)
            event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})


def streams(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route that answers, where `stream` asks for it, with events of `chunk`."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{chunk.__name__}"},
    }
    fault = {**data, "contentSchema": {"$ref": "#/components/schemas/ErrorBody"}}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}, fault]}},
        "description": "Chunks, then [DONE]; where the request fails half-way, the error instead, as the last event.",
    }
    return {200: {"content": {"text/event-stream": {"itemSchema": event}}}}


async def run_until_disconnect(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer; if the client leaves before it is there, it is cancelled and what is returned is read by nobody.

    The body of the request must have been read.
    """
    response = await _until_client_leaves(request.receive, answer)
    return Response(status_code=_CLIENT_LEFT) if response is None else response


async def _until_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if the client left first, which cancels it.

    It is done in the present task, since one of its own would begin a turn of the event loop later. So the task can
    only be cancelled while the work waits for something, which is where it hears of it.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    async def cancel_when_client_leaves() -> None:
        nonlocal left
        await _client_leaves(receive)
        left = True
        task.cancel()

    leaving = asyncio.ensure_future(cancel_when_client_leaves())
    try:
        return await work
    except asyncio.CancelledError:
        if not left or task.uncancel() > 0:  # somebody else has cancelled the task
            raise
        return None
    finally:
        leaving.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
