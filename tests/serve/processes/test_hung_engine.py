"""An engine that hangs without dying: it is killed once it has said nothing for too long, and only then."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from benchmarks.stub_engine import StubConfig
from strata.engine.process.messages import Add, Embed
from strata.engine.sampling_params import SamplingParams
from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds
from tests.serve.running import is_alive, running, wait_for

SILENCE = 1.0  # the stub says how it stands twice a second


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def stub(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that speaks as the engine does and gives a token every 10 ms."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.stub_engine"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(StubConfig(address)) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def connected(
    address: str, silence_timeout: float, ends: EngineEnds | None = None
) -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect(address, timeout=120, silence_timeout=silence_timeout, ends=ends)
    try:
        yield client
    finally:
        await client.close()


def add(max_tokens: int, id: str = "a") -> Add:
    return Add(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens))


async def test_all_that_wait_are_told_and_the_engine_is_killed(
    address: str, stub: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "strata.serve"):
        async with connected(address, SILENCE) as client:
            stream = client.submit(add(100_000))
            await anext(stream)
            vector = asyncio.create_task(client.embed(Embed("b", [1, 2], "mean", 0.0)))
            await asyncio.sleep(0)
            stub.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineGone, match=r"said nothing for 1 s"):
                _ = [deltas async for deltas in stream]
            assert SILENCE - 0.1 < time.monotonic() - start < SILENCE + 30
            with pytest.raises(EngineGone):
                await vector
            assert not client.alive
            assert stub.wait(60) == -signal.SIGKILL
    assert [record.getMessage() for record in caplog.records] == [
        "the engine is taken for dead and killed: it has requests and said nothing for 1 s"
    ]


async def test_a_process_without_requests_learns_why_another_killed_the_engine(
    address: str, stub: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It would hear of the signal alone, which is most often one of a lack of memory."""
    ends = EngineEnds(tmp_path)
    async with connected(address, SILENCE, ends) as client, connected(address, SILENCE, ends) as idle:
        stream = client.submit(add(100_000))
        await anext(stream)
        stub.send_signal(signal.SIGSTOP)
        assert await idle.wait_dead() == await client.wait_dead() == "it has requests and said nothing for 1 s"
        ends.tell(stub.pid, "the engine process was killed by SIGKILL")  # as its parent does
        assert await ends.find(stub.pid) == await client.wait_dead()
        await stream.aclose()


async def test_time_without_requests_does_not_count(address: str, stub: subprocess.Popen[bytes]) -> None:
    silence = 2.5  # far more than this and the stub may be late
    async with connected(address, silence) as client:
        assert len([one async for one in client.submit(add(1))]) == 1  # sets the clock going
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(silence - 0.5)
        waiting = client.submit(add(1, "b"))  # soon after which the clock strikes
        await asyncio.sleep(1)
        assert client.alive
        stub.send_signal(signal.SIGCONT)
        assert len([one async for one in waiting]) == 1
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * silence)
        assert client.alive
        stub.send_signal(signal.SIGCONT)


async def test_an_engine_that_talks_and_a_program_that_was_busy_are_no_silence(
    address: str, stub: subprocess.Popen[bytes]
) -> None:
    async with connected(address, SILENCE) as client:
        count, start = 0, time.monotonic()
        async for deltas in client.submit(add(300)):
            count += sum(len(delta.tokens) for delta in deltas)
            if count < 5:
                time.sleep(2 * SILENCE)  # the program hears nothing, but could
        assert count == 300
        assert time.monotonic() - start > 2 * SILENCE


async def test_without_a_bound_nothing_is_killed(address: str, stub: subprocess.Popen[bytes]) -> None:
    async with connected(address, 0.0) as client:
        stream = client.submit(add(3))
        stub.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1)
        assert client.alive
        stub.send_signal(signal.SIGCONT)
        assert sum(len(delta.tokens) for deltas in [one async for one in stream] for delta in deltas) == 3


def eventually(condition: Callable[[], bool]) -> None:
    wait_for(condition)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_whose_engine_hangs_says_so_and_ends(workers: str) -> None:
    with running("--engine-timeout", "2", "--api-workers", workers) as server, ThreadPoolExecutor(1) as pool:
        children = server.children()
        with server.stream(max_tokens=1000) as events:
            next(events)
            os.kill(server.engine(), signal.SIGSTOP)
            whole = pool.submit(server.complete, max_tokens=10)
            rest = list(events)
        assert rest[-1]["error"]["code"] == "engine_dead"
        assert set(rest[-1]["error"]) == {"message", "type", "param", "code"}
        assert server.status("/health") == 503
        assert whole.result().status_code == 503
        assert server.wait() == 1
        assert "the engine is taken for dead and killed" in server.output()
        eventually(lambda: not any(map(is_alive, children)))


def test_a_hung_engine_is_replaced_if_that_is_asked_for() -> None:
    with running("--engine-timeout", "2", "--restart-engine") as server:
        first = server.engine()
        answer = server.complete(temperature=0, max_tokens=20).json()["choices"]
        os.kill(first, signal.SIGSTOP)
        refused = server.complete(max_tokens=1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_dead"
        wait_for(lambda: server.status("/ready") == 200, server.output)
        assert server.engine() != first
        assert not is_alive(first)
        assert server.complete(temperature=0, max_tokens=20).json()["choices"] == answer
