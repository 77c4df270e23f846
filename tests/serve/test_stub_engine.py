"""The engine without a model, which benchmarks stand on, as its clients see it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.stub_engine import StubConfig
from strata.engine.process.messages import Add, Delta
from strata.engine.sampling_params import SamplingParams
from strata.serve.client import EngineClient, Stream

ROOT = Path(__file__).resolve().parents[2]
INTERVAL = 0.02


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"ipc://{tmp_path_factory.mktemp('stub')}/engine.sock"
    command = [sys.executable, "-m", "benchmarks.stub_engine"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(StubConfig(address, interval=INTERVAL, tokens=(5, 6))) + b"\n")
        process.stdin.flush()
        yield address
        process.stdin.close()
        assert process.wait(60) == 0, "it ends with its parent"


async def read(stream: Stream) -> list[tuple[float, Delta]]:
    return [(time.monotonic(), delta) async for deltas in stream for delta in deltas]


async def test_tokens_come_at_its_pace_and_as_many_as_were_asked_for(address: str) -> None:
    client = await EngineClient.connect(address, timeout=120)
    start = time.monotonic()
    told = await read(client.submit(Add("a", [1, 2], SamplingParams(max_tokens=11, n=2))))
    await client.close()
    for index in (0, 1):
        own = [(at, delta) for at, delta in told if delta.index == index]
        assert sum(len(delta.tokens) for _, delta in own) == 11
        assert [delta.finish_reason for _, delta in own] == [None] * (len(own) - 1) + ["length"]
        assert {token for _, delta in own for token in delta.tokens} <= {5, 6}
        assert own[0][1].scheduled is not None
    assert told[-1][0] - start > 9 * INTERVAL, "the first token waits for no step, the ten others do"


async def test_what_is_aborted_or_finished_gets_no_more(address: str) -> None:
    client = await EngineClient.connect(address, timeout=120)
    stream = client.submit(Add("a", [1], SamplingParams(max_tokens=1000, n=2)))
    await anext(stream)
    client.finish("a", 1, "stop")
    while client.statistics.running != 1:
        assert {delta.index for delta in await anext(stream)} == {0}
    await stream.aclose()
    async with asyncio.timeout(60):
        while client.statistics.running:
            await asyncio.sleep(0.05)
    await client.close()
