"""How engines have ended, in files; the engine without a model that benchmarks stand on; the event loop."""

from __future__ import annotations

import asyncio
import os
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
from strata.serve import engine_ends
from strata.serve.client import EngineClient, Stream
from strata.serve.engine_ends import EngineEnds
from strata.serve.event_loop import new_event_loop


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineEnds:
    monkeypatch.setattr(engine_ends, "_MAX_SECONDS", 0.05)
    return EngineEnds(tmp_path)


def test_what_is_told_first_is_found_by_every_reader_until_that_number_begins_anew(
    ends: EngineEnds, tmp_path: Path
) -> None:
    """A client kills an engine that is silent, of which its parent sees the signal alone."""
    ends.begin(7)
    ends.tell(7, "it said nothing")
    ends.tell(7, "it was killed")
    assert [asyncio.run(EngineEnds(tmp_path).find(pid)) for pid in (7, 7, 8)] == ["it said nothing"] * 2 + [None]
    ends.begin(7)
    assert asyncio.run(ends.find(7)) is None


@pytest.mark.parametrize("name", [f"ended-7.{os.getpid()}", "ended-7"], ids=["before it is whole", "whole"])
def test_where_no_file_can_be_written_nothing_is_told_and_nothing_fails(
    ends: EngineEnds, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / name).mkdir()  # as a full disk does, for root too
    ends.tell(7, "it was killed")
    assert "clients are not told how an engine ended" in caplog.text
    assert asyncio.run(ends.find(7)) is None


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


@pytest.mark.parametrize("is_there", [True, False])
def test_uvloop_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    if is_there:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)

    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(kind()) == ("uvloop" if is_there else "asyncio")
