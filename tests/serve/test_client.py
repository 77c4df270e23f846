"""The client against an engine that says exactly what a test wants; a real one is in tests/engine/process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from strata.engine.process.messages import (
    Abort,
    Add,
    Delta,
    Embed,
    Embedding,
    Fault,
    Finish,
    FromEngine,
    Hello,
    PromptLogprobs,
    Ready,
    Refused,
    Statistics,
    Step,
    ToEngine,
    TokenLogprobs,
)
from strata.engine.sampling_params import SamplingParams
from strata.serve import engine_ends
from strata.serve.client import EngineClient, EngineGone, EngineRefused, Stream
from strata.serve.engine_ends import EngineEnds

PID = 1 << 30  # no process has it
READY = Ready("tiny", 300, 2, 256, [0], SamplingParams(), 8, 100, 16, "cpu", {"weights": 0.5}, pid=PID)


class ScriptedEngine:
    """The engine's end of the line, one client at a time."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._client = b""

    async def heard(self) -> ToEngine:
        for _ in range(3000):
            if self._socket.poll(0):
                self._client, frame = self._socket.recv_multipart()
                return self._decoder.decode(frame)
            await asyncio.sleep(0.01)
        raise AssertionError("the client said nothing within 30 s")

    def heard_nothing(self) -> bool:
        return not self._socket.poll(50)

    async def say(self, *messages: FromEngine) -> None:
        """Sends, and gives the client the time to take it in."""
        for message in messages:
            self._socket.send_multipart([self._client, msgspec.msgpack.encode(message)])
        await asyncio.sleep(0.2)

    async def tell(self, *deltas: Delta, running: int = 0) -> None:
        await self.say(Step(list(deltas), Statistics(running=running)))

    def close(self) -> None:
        self._context.destroy(linger=1000)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def engine(address: str) -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(address)
    yield made
    made.close()


@asynccontextmanager
async def connected(
    engine: ScriptedEngine, address: str, ends: EngineEnds | None = None
) -> AsyncIterator[EngineClient]:
    connecting = asyncio.create_task(EngineClient.connect(address, timeout=60, ends=ends))
    assert await engine.heard() == Hello()
    await engine.say(READY)
    client = await connecting
    try:
        yield client
    finally:
        await client.close()


def add(id: str = "a", **params: Any) -> Add:
    return Add(id, [1, 2, 3], SamplingParams(**params))


async def rest(stream: Stream) -> list[list[Delta]]:
    return [deltas async for deltas in stream]


async def test_connect_waits_until_the_engine_is_there_and_ready(address: str) -> None:
    connecting = asyncio.create_task(EngineClient.connect(address, timeout=60))
    await asyncio.sleep(0.1)
    engine = ScriptedEngine(address)
    assert await engine.heard() == Hello()
    assert not connecting.done()
    await engine.say(READY)
    client = await connecting
    assert client.ready == READY
    assert client.alive
    await client.close()
    await client.close()
    assert not client.alive
    engine.close()


@pytest.mark.parametrize("present", [False, True], ids=["nobody there", "no answer"])
async def test_connect_gives_up_in_time(address: str, present: bool) -> None:
    engine = ScriptedEngine(address) if present else None
    with pytest.raises(EngineGone, match=r"not ready after 0\.2 s"):
        await EngineClient.connect(address, timeout=0.2)
    if engine is not None:
        engine.close()


async def test_connect_tells_why_the_engine_will_not_serve(engine: ScriptedEngine, address: str) -> None:
    connecting = asyncio.create_task(EngineClient.connect(address, timeout=60))
    await engine.heard()
    await engine.say(Fault("speaks another protocol"))
    with pytest.raises(EngineGone, match="speaks another protocol"):
        await connecting


async def test_a_reader_that_keeps_up_gets_every_delta(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        assert await engine.heard() == add()
        said = [
            Delta("a", 0, [4], scheduled=1.5, cached_tokens=2),
            Delta("a", 0, [5]),
            Delta("a", 0, [6], "stop", 6),
        ]
        for delta in said:
            await engine.tell(delta, running=7)
            assert await anext(stream) == [delta]
        assert await rest(stream) == []
        assert client.statistics == Statistics(running=7)
        await stream.aclose()
        assert engine.heard_nothing()


async def test_what_waits_for_a_slow_reader_is_one_delta_a_sample(engine: ScriptedEngine, address: str) -> None:
    first, second, third = (TokenLogprobs(token, -0.5, 1, [token], [-0.5]) for token in (4, 5, 6))
    async with connected(engine, address) as client:
        stream = client.submit(add(n=2, logprobs=1))
        await engine.heard()
        await engine.tell(
            Delta("a", 0, [4], logprobs=[first], scheduled=1.5, cached_tokens=16), Delta("a", 1, [9], logprobs=[])
        )
        await engine.tell(Delta("a", 0, [5], logprobs=[second]), Delta("other", 0, [1]))
        await engine.tell(Delta("a", 0, [6], "stop", 6, logprobs=[third]))
        assert await anext(stream) == [
            Delta("a", 0, [4, 5, 6], "stop", 6, [first, second, third], 1.5, 16),
            Delta("a", 1, [9], logprobs=[]),
        ]
        await engine.tell(Delta("a", 1, [], "error", error="NaN"))
        assert await rest(stream) == [[Delta("a", 1, [], "error", error="NaN")]]


async def test_prompt_logprobs_are_there_with_the_first_delta(engine: ScriptedEngine, address: str) -> None:
    rows = [TokenLogprobs(token, -1.0, 2, [], []) for token in (2, 3)]
    async with connected(engine, address) as client:
        stream = client.submit(add(prompt_logprobs=0))
        await engine.heard()
        await engine.say(PromptLogprobs("a", 1, rows[:1]), PromptLogprobs("a", 2, rows[1:]))
        await engine.tell(Delta("a", 0, [4], "length"))
        assert await anext(stream) == [Delta("a", 0, [4], "length")]
        assert stream.prompt_logprobs == rows


async def test_a_finished_sample_tells_nothing_more(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add(n=2))
        await engine.heard()
        await engine.tell(Delta("a", 0, [4]), Delta("a", 1, [5]))
        await anext(stream)
        client.finish("a", 0, "stop here")
        client.finish("a", 0, "again")
        client.finish("unknown", 0, "x")
        await engine.tell(Delta("a", 0, [6]))  # was on its way
        assert await engine.heard() == Finish("a", 0, "stop here")
        assert engine.heard_nothing()
        await engine.tell(Delta("a", 1, [7]))
        assert await anext(stream) == [Delta("a", 1, [7])]
        client.finish("a", 1, "x")
        assert await rest(stream) == []
        client.submit(add())  # the id is free again


async def test_closing_a_stream_aborts_it_once(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        with pytest.raises(ValueError, match="'a' is in use"):
            client.submit(add())
        assert await engine.heard() == add()
        reading = asyncio.create_task(rest(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        await stream.aclose()
        client.abort("a")
        assert await engine.heard() == Abort(["a"])
        assert engine.heard_nothing()
        assert await reading == []
        await engine.tell(Delta("a", 0, [4]))  # was on its way
        assert await rest(stream) == []


async def test_a_cancelled_reader_loses_nothing(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        await engine.heard()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        await engine.tell(Delta("a", 0, [4]))
        assert await anext(stream) == [Delta("a", 0, [4])]


async def test_an_expired_stream_gives_what_has_come_and_no_more(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        other = client.submit(add("b"))
        await engine.heard()
        await engine.heard()
        await engine.tell(Delta("a", 0, [1]), Delta("b", 0, [2]))
        assert await anext(other) == [Delta("b", 0, [2])]
        stream.expire()
        await engine.tell(Delta("a", 0, [3]), Delta("b", 0, [4]))
        assert await anext(other) == [Delta("b", 0, [4])]
        assert await anext(stream) == [Delta("a", 0, [1])]
        with pytest.raises(TimeoutError):
            await anext(stream)
        await stream.aclose()
        assert await engine.heard() == Abort(["a"])


async def test_expiry_wakes_a_reader_that_waits(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        reading = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert not reading.done()
        stream.expire()
        done, _ = await asyncio.wait((reading,), timeout=60)
        assert [type(task.exception()) for task in done] == [TimeoutError]


async def test_a_refused_request_raises_the_reason(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        embedding = asyncio.create_task(client.embed(Embed("e", [1])))
        await asyncio.sleep(0)
        await engine.heard()
        await engine.say(Refused("a", "the prompt is empty"), Refused("e", "too long"), Refused("?", "nobody's"))
        for _ in range(2):
            with pytest.raises(EngineRefused, match="the prompt is empty"):
                await anext(stream)
        with pytest.raises(EngineRefused, match="too long"):
            await embedding
        assert client.alive


async def test_embeddings(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        embedding = asyncio.create_task(client.embed(Embed("e", [1], "mean")))
        assert await engine.heard() == Embed("e", [1], "mean")
        await engine.say(Embedding("e", b"\x00\x00\x00\x3f\x00\x00\x80\xbf"))
        assert await embedding == [0.5, -1.0]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.embed(Embed("e", [1])), 0.05)
        assert await engine.heard() == Embed("e", [1])
        assert await engine.heard() == Abort(["e"])


@pytest.mark.parametrize("told", [True, False])
async def test_how_an_engine_without_last_words_ended_is_told_by_its_parent(
    address: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the connection has ended, or not at all; nothing is asked of the engine any more meanwhile."""
    monkeypatch.setattr(engine_ends, "_MAX_SECONDS", 30.0 if told else 0.1)
    ends = EngineEnds(tmp_path)
    engine = ScriptedEngine(address)
    async with connected(engine, address, ends=ends) as client:
        before = client.submit(add("a"))
        await engine.heard()
        engine.close()
        ended = asyncio.create_task(client.wait_dead())
        while client.alive:
            await asyncio.sleep(0.001)
        after, embedding = client.submit(add("b")), asyncio.create_task(client.embed(Embed("e", [1])))
        if told:
            ends.tell(PID + 1, "of another")
            await asyncio.sleep(0.05)
            assert not ended.done()
            ends.tell(PID, "it was killed")
        reason = await asyncio.wait_for(ended, 30)
        assert reason == ("it was killed" if told else "the engine process has ended")
        for stream in (before, after, client.submit(add("c"))):
            with pytest.raises(EngineGone, match=reason):
                await anext(stream)
        with pytest.raises(EngineGone, match=reason):
            await embedding


async def test_a_client_that_is_closed_does_not_wait_for_how_the_engine_ended(address: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(address)
    async with connected(engine, address, ends=EngineEnds(tmp_path)) as client:
        engine.close()
        while client.alive:
            await asyncio.sleep(0.001)
        await client.close()
        assert await asyncio.wait_for(client.wait_dead(), 0.5) == "the connection to the engine was closed"


@pytest.mark.parametrize("fault", [None, "out of memory"])
async def test_everybody_hears_of_the_engines_end(address: str, fault: str | None) -> None:
    engine = ScriptedEngine(address)
    async with connected(engine, address) as client:
        streams = [client.submit(add(id)) for id in "abc"]
        embedding = asyncio.create_task(client.embed(Embed("e", [1])))
        for _ in "abce":
            await engine.heard()
        await engine.tell(Delta("a", 0, [4]))
        if fault is not None:
            await engine.say(Fault(fault))
        engine.close()
        reason = await asyncio.wait_for(client.wait_dead(), 30)
        assert reason == (fault or "the engine process has ended")
        assert not client.alive
        assert await anext(streams[0]) == [Delta("a", 0, [4])]  # what came before is not lost
        for stream in (*streams, client.submit(add("d"))):
            with pytest.raises(EngineGone, match=reason):
                await anext(stream)
        with pytest.raises(EngineGone, match=reason):
            await embedding
        with pytest.raises(EngineGone, match=reason):
            await client.embed(Embed("f", [1]))
        await streams[0].aclose()


async def test_closing_the_client_aborts_what_runs(engine: ScriptedEngine, address: str) -> None:
    async with connected(engine, address) as client:
        stream = client.submit(add())
        await engine.heard()
    assert await engine.heard() == Abort(["a"])
    with pytest.raises(EngineGone, match="closed"):
        await anext(stream)


async def test_a_burst_leaves_other_tasks_their_turn_and_loses_nothing(engine: ScriptedEngine, address: str) -> None:
    """More frames than are read in a turn, and requests sent while they arrive: ZeroMQ tells of arrivals only once."""
    async with connected(engine, address) as client:
        streams = {id: client.submit(add(id)) for id in ("a", "b")}
        for _ in streams:
            await engine.heard()
        for token in range(1000):
            step = Step([Delta("a", 0, [token]), Delta("b", 0, [token])], Statistics())
            engine._socket.send_multipart([engine._client, msgspec.msgpack.encode(step)])
            if token % 100 == 0:
                client.submit(add(f"more {token}"))
        await engine.tell(*(Delta(id, 0, [], "length") for id in streams))
        for stream in streams.values():
            got = await rest(stream)
            assert [token for deltas in got for delta in deltas for token in delta.tokens] == list(range(1000))
