"""Clients that leave: whatever their request was at, it ends and its pages come back; work shares the loop."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import Request, Response
from starlette.types import Message

from strata.serve.http.limits import LoopShare
from strata.serve.http.sse import run_until_disconnect
from tests.serve.live import LiveServer
from tests.serve.scripted import Serve

LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 900, "prompt": "47 + 38"}


def ask(live: LiveServer, **body: Any) -> socket.socket:
    """Send a request and leave the answer unread."""
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    return connection


def aborts(live: LiveServer) -> float:
    text = live.client.get("/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith("strata_aborts_total{")))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_in_decode(live: LiveServer, stream: bool, n: int) -> None:
    before = aborts(live)
    connection = ask(live, **LONG, stream=stream, n=n)
    live.wait_until(lambda: live.state.client.statistics.running == n)
    assert not live.idle
    steps = live.state.client.statistics.steps
    connection.close()
    live.wait_until(lambda: live.idle)
    assert live.state.client.statistics.steps - steps < LONG["max_tokens"] - 100  # far from its end
    assert aborts(live) == before + 1


def test_in_the_queue(live: LiveServer) -> None:
    """More sequences than the engine runs at once: those that wait are gone as soon as those that run."""
    most = live.state.client.ready.max_sequences
    connections = [ask(live, **LONG, n=16) for _ in range(most // 16 + 1)]
    live.wait_until(lambda: live.state.client.statistics.waiting > 0)
    for connection in reversed(connections):
        connection.close()
    live.wait_until(lambda: live.idle)


def test_before_the_first_token(live: LiveServer) -> None:
    for _ in range(5):
        ask(live, **{**LONG, "prompt": [5] * 900, "max_tokens": 100}, stream=True).close()
    live.wait_until(lambda: live.idle)


def test_what_is_asked_meanwhile_is_answered(live: LiveServer) -> None:
    alone = live.post("/v1/completions", prompt="47 + 38", max_tokens=30)["choices"][0]["text"]
    connections = [ask(live, **LONG, stream=True) for _ in range(4)]
    live.wait_until(lambda: live.state.client.statistics.running == 4)
    connections[0].close()
    assert live.post("/v1/completions", prompt="47 + 38", max_tokens=30)["choices"][0]["text"] == alone
    for connection in connections:
        connection.close()
    live.wait_until(lambda: live.idle)


def test_a_stream_given_up_half_way(live: LiveServer) -> None:
    with httpx.stream("POST", f"{live.url}/v1/completions", json={**LONG, "stream": True}) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 10:
                break
    live.wait_until(lambda: live.idle)


def test_a_failed_request_of_several_prompts_ends_the_others(
    serve_script: Serve,
) -> None:
    """All or none: the second has a token a digit, too many for the model, so the first is aborted."""
    with serve_script([], hangs=True) as server:
        start = time.monotonic()
        response = server.client.post("/v1/completions", json={"prompt": ["a", "1" * 2_000]})
        assert response.status_code == 400
        assert [stream.closed for stream in server.engine.streams] == [True]
        assert server.state.limits.in_flight == 0
        assert time.monotonic() - start < 5


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


async def test_a_caller_rests_longer_than_it_works_and_others_do_not_wait_for_it() -> None:
    share = LoopShare()
    done: list[str] = []

    async def work(caller: str) -> None:
        async with share.time_slice(caller):
            time.sleep(0.02)
            done.append(caller)

    start = time.monotonic()
    busy = [asyncio.create_task(work("a")) for _ in range(5)]
    await asyncio.sleep(0)
    await work("b")
    assert done.count("a") <= 1
    await asyncio.gather(*busy)
    assert time.monotonic() - start >= 5 * 0.02 + 4 * 0.08


async def test_work_that_fails_or_is_cancelled_keeps_nobody_waiting() -> None:
    share = LoopShare()
    for error in (ValueError, asyncio.CancelledError):
        try:
            async with share.time_slice("a"):
                raise error
        except (ValueError, asyncio.CancelledError):
            pass
    async with asyncio.timeout(10), share.time_slice("a"):
        pass
