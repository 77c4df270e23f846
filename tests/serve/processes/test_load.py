"""More than a server can do, and clients that behave badly in numbers.

Short by default; STRATA_FULL_LOAD=1 runs what the criteria say: 60 s of overload, 200 rounds of 64 clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import LONG, QUESTION, Running, http_request, resident_bytes, running, wait_for

FULL = bool(os.environ.get("STRATA_FULL_LOAD"))
IDLE = (0, 0, 0)

# ---- 2x overload ----


@dataclass(frozen=True)
class Outcome:
    """retry_after: of a refusal. seconds: from sending to the whole answer."""

    status: int
    retry_after: str | None
    seconds: float
    tokens: int


async def ask(client: httpx.AsyncClient) -> Outcome:
    start = time.perf_counter()
    body = {**QUESTION, "temperature": 0, "ignore_eos": True, "max_tokens": 60}
    response = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - start
    tokens = response.json()["usage"]["completion_tokens"] if response.status_code == 200 else 0
    return Outcome(response.status_code, response.headers.get("retry-after"), seconds, tokens)


async def saturate(client: httpx.AsyncClient, clients: int, seconds: float) -> list[Outcome]:
    """A fixed number of clients that each send again when answered."""
    outcomes: list[Outcome] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < end:
            outcomes.append(await ask(client))

    await asyncio.gather(*(one() for _ in range(clients)))
    return outcomes


async def arrive(client: httpx.AsyncClient, rate: float, seconds: float, seed: int) -> list[Outcome]:
    """Requests at exponential distances, whether or not those before were answered."""
    draw = random.Random(seed)
    due, sent = time.perf_counter(), []
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent.append(asyncio.create_task(ask(client)))
        due += draw.expovariate(rate)
    return await asyncio.gather(*sent)


def percentile(outcomes: list[Outcome], share: float) -> float:
    """Of the seconds that they took."""
    return sorted(outcome.seconds for outcome in outcomes)[min(len(outcomes) - 1, int(share * len(outcomes)))]


async def overload(url: str, seconds: float, seed: int) -> tuple[list[Outcome], list[Outcome]]:
    """What eight clients got for half of `seconds`, and what twice as many requests as that got for all of them."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await saturate(client, 8, 1)
        full = await saturate(client, 8, seconds / 2)
        return full, await arrive(client, 2 * len(full) / (seconds / 2), seconds, seed)


def test_twice_the_load_it_can_bear_is_refused_at_once_or_served_as_without_it() -> None:
    seconds, share, slack = (60.0, 0.99, 1.2) if FULL else (1.5, 0.9, 1.5)  # a short run's tail is a few requests
    rejects, ratios = 0, []
    with running("--max-num-seqs", "4", "--max-queue", "4") as server:
        for seed in range(8):  # what else this machine does, and only that, differs from one time to the next
            full, overloaded = asyncio.run(overload(server.url, seconds, seed))
            admitted = [outcome for outcome in overloaded if outcome.status == 200]
            refused = [outcome for outcome in overloaded if outcome.status != 200]
            assert all(outcome.tokens == 60 for outcome in (*full, *admitted))
            assert {outcome.status for outcome in refused} == {503}
            assert all(int(outcome.retry_after or 0) >= 1 for outcome in refused)
            rejects += len(refused)
            assert server.metric("strata_rejects_total") == rejects
            part, wait = len(refused) / len(overloaded), percentile(refused, 0.5)
            ratios.append((part, wait, percentile(admitted, share) / percentile(full, share)))
            # At once is a tenth of the time that an answer takes, where that is longer than 50 ms.
            at_once = max(0.05, 0.1 * percentile(full, 0.5))
            if 0.25 < part < 0.75 and wait < at_once and ratios[-1][2] < slack:
                break
        else:
            pytest.fail(f"refused share, seconds to a refusal, times as slow as without overload: {ratios}")
        wait_for(lambda: server.load() == IDLE)


# ---- clients in numbers ----


# PyTorch's libraries keep compiled products, up to 1024 for as many numbers of rows: fewer show what else would stay.
FEW_COMPILED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}


@pytest.fixture(scope="module")
def wide() -> Iterator[Running]:
    arguments = ("--max-num-seqs", "64", "--max-queue", "64", "--num-pages", "2048")
    with running(*arguments, environment=FEW_COMPILED) as started:
        yield started


def median_gap(server: Running) -> float:
    """Seconds between two tokens of a stream, as its client sees them."""
    with server.stream(max_tokens=150) as events:
        times = [time.perf_counter() for _ in events]
    gaps = sorted(later - earlier for earlier, later in pairwise(times[10:]))
    return gaps[len(gaps) // 2]


def test_a_client_that_reads_slowly_slows_no_other_and_gets_everything(wide: Running) -> None:
    much = {**LONG, "n": 16, "logprobs": 20, "max_tokens": 450}
    ratios = []
    for _ in range(6):  # what else this machine does, and only that, differs from one time to the next
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_answer, wide.send(**much))
            beside_fast = median_gap(wide)
            size, expected = reading.result()
        before = resident_bytes(wide.pid)
        with wide.send(**much) as slow:
            ratios.append(median_gap(wide) / beside_fast)
            wait_for(lambda: wide.load() == IDLE)  # the engine does not wait for it
            assert resident_bytes(wide.pid) - before < 100e6
            assert read_answer(slow)[1] == expected == 16 * 450
        assert size > 4e6  # more than the sockets on the way hold
        if ratios[-1] < 1.05:
            break
    assert min(ratios) < 1.05


def read_answer(connection: socket.socket) -> tuple[int, int]:
    """Read an answer to its end: its bytes, and its tokens."""
    with connection.makefile("rb") as stream:
        whole = stream.read()
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = re.findall(rb"^data: ({.*})", whole, re.MULTILINE)
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return len(whole), sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])


def test_clients_killed_at_random_moments_leave_nothing_behind(wide: Running) -> None:
    draw = random.Random(0)
    rounds, clients = (200, 64) if FULL else (10, 32)
    engine = wide.engine()
    for _ in range(4):  # what is built, and which page is touched, on first use
        asyncio.run(kill_clients(wide, draw, clients))
    wait_for(lambda: wide.load() == IDLE)
    before = resident_bytes(wide.pid), resident_bytes(engine), open_files(wide.pid)
    for _ in range(rounds):
        asyncio.run(kill_clients(wide, draw, clients))
        wait_for(lambda: wide.load() == IDLE)
    # A connection that its client has left is closed when the server comes to it.
    wait_for(lambda: open_files(wide.pid) <= before[2] + 2)
    after = resident_bytes(wide.pid), resident_bytes(engine)
    assert after[0] - before[0] < 30e6
    assert after[1] - before[1] < 30e6
    assert wide.engine() == engine
    # All 128 places are free again: as many requests at once are all admitted.
    with ThreadPoolExecutor(128) as pool:
        statuses = list(pool.map(lambda _: wide.complete(max_tokens=2).status_code, range(128)))
    assert statuses == [200] * 128


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def kill_clients(server: Running, draw: random.Random, clients: int) -> None:
    """Clients that ask for all kinds of things, and are gone within a fifth of a second."""

    async def one() -> None:
        path, body = draw.choice(KINDS)
        await asyncio.sleep(draw.uniform(0, 0.05))
        _, writer = await asyncio.open_connection(*server.address)
        request = http_request(path, {**body, "model": "builtin"})
        writer.write(request[: draw.randrange(len(request))] if draw.random() < 0.1 else request)
        await asyncio.sleep(draw.uniform(0, 0.15))
        writer.transport.abort() if draw.random() < 0.5 else writer.close()

    await asyncio.gather(*(one() for _ in range(clients)))


CHAT = {"messages": [{"role": "user", "content": "Tell a story."}], "ignore_eos": True}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**LONG, "prompt": "Once", "max_tokens": 500}),
    ("/v1/completions", {"prompt": "Once " * 300, "max_tokens": 500, "n": 3, "logprobs": 5, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 300, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 300}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 100, "response_format": JSON, "ignore_eos": False}),
    ("/v1/responses", {"input": "Tell a story.", "max_output_tokens": 300, "stream": True}),
    ("/v1/embeddings", {"input": ["a story " * 50] * 8}),
]
