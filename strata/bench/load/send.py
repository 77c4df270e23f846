"""Sending a load: each request when it is due, and exactly one outcome for each."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from strata.bench.load.answer import Answer, AnswerFault
from strata.bench.load.connection import ConnectionCut, HttpClient
from strata.serve.event_loop import new_event_loop

T = TypeVar("T")


@dataclass(frozen=True)
class LoadRequest:
    """output_tokens: how many the answer must have. turn: of the session that it goes on, from 1, whose next turn
    needs the answer's ids; 0: of none."""

    path: str
    body: bytes
    output_tokens: int
    turn: int = 0


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request; times are seconds from the start of the load.

    due: when it was to be sent. sent: when it was. times: when each chunk with text came. fault: None if all is well.
    turn: as of its request. ids: of the output, where the server told them.
    """

    due: float
    sent: float
    times: tuple[float, ...]
    ended: float
    prompt_tokens: int
    output_tokens: int
    fault: AnswerFault | None
    turn: int = 0
    ids: tuple[int, ...] = ()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, with as many open connections as the system lets this process have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def send_all(
    client: HttpClient,
    requests: Sequence[LoadRequest],
    due: Sequence[float],
    *,
    max_concurrency: int | None,
    timeout: float,
    on_end: Callable[[], None] = lambda: None,
) -> list[RequestOutcome]:
    """The outcome of each request, in order.

    due: when each is sent, in seconds from now, rising; with `max_concurrency` of them under way, the next one waits.
    timeout: seconds after which a request is given up. on_end: called as each request ends.
    """
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    start = time.perf_counter()

    async def send(request: LoadRequest, at: float) -> RequestOutcome:
        try:
            return await send_one(client, request, start, at, timeout)
        finally:
            slots.release()
            on_end()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, at in zip(requests, due, strict=True):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            await slots.acquire()
            tasks.append(group.create_task(send(request, at)))
    return [task.result() for task in tasks]


async def send_one(
    client: HttpClient, request: LoadRequest, start: float, due: float, timeout: float
) -> RequestOutcome:
    """What becomes of a request sent now. start: of the load, by `time.perf_counter()`. timeout: seconds."""
    answer = Answer()
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            status = await client.post(request.path, request.body, answer.append)
        fault = answer.fault(status, request.output_tokens, with_ids=request.turn > 0)
    except TimeoutError:
        fault = AnswerFault("timeout", f"no end within {timeout:g} s", lost=True)
    except ConnectionCut as error:
        fault = AnswerFault("cut", str(error), lost=True)
    except OSError as error:
        fault = AnswerFault("connect", str(error), lost=True)
    ended = time.perf_counter()
    times = tuple(moment - start for moment in answer.times)
    tokens = answer.prompt_tokens, answer.output_tokens
    return RequestOutcome(due, sent - start, times, ended - start, *tokens, fault, request.turn, tuple(answer.ids))
