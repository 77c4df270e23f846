"""Work that ends when the client leaves, and nothing else that does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fastapi import Request, Response
from starlette.types import Message

from strata.serve.http.sse import run_until_disconnect

Receive = Callable[[], Awaitable[Message]]


def request(receive: Receive) -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_client_that_leaves_ends_the_work_where_it_waits() -> None:
    ended = []
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> Response:
        try:
            left.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # ending may take its time
            ended.append(True)
        raise AssertionError

    await run_until_disconnect(request(receive), work())
    assert ended == [True]
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    await asyncio.sleep(0)  # what comes after is not cancelled


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_else() -> None:
    for turns in range(6):  # one of them is the turn in which both happen

        async def receive(turns: int = turns) -> Message:
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def work() -> Response:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return Response("done")

        await run_until_disconnect(request(receive), work())
        await asyncio.sleep(0.001)


async def test_what_cancels_the_task_from_outside_is_passed_on() -> None:
    async def work() -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.ensure_future(run_until_disconnect(request(stays), work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_faults_of_the_work_are_its_own() -> None:
    async def work() -> Response:
        await asyncio.sleep(0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await run_until_disconnect(request(stays), work())
