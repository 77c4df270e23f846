"""Several engines behind one client, each of which says what a test wants; and which of them drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from strata.engine.process.messages import (
    Abort,
    Add,
    AskLedgers,
    Delta,
    Embed,
    Embedding,
    Fault,
    Finish,
    Hello,
    Ledgers,
    Statistics,
    Step,
)
from strata.engine.routing.router import BLOCK_TOKENS, ReplicaState
from strata.engine.sampling_params import SamplingParams
from strata.serve.client import EngineClient, EngineGone
from strata.serve.routing import replicas as module
from strata.serve.routing.replicas import LastReplica, ReplicaDrains, Replicas
from tests.serve.test_client import READY, ScriptedEngine

DOCUMENT = [7] * (8 * BLOCK_TOKENS)  # saves as much as two samples weigh


@asynccontextmanager
async def engines_of(folder: Path, count: int = 2) -> AsyncIterator[tuple[list[ScriptedEngine], Replicas]]:
    """So many engines, all ready, and their replicas."""
    addresses = [f"ipc://{folder}/engine-{number}.sock" for number in range(count)]
    engines = [ScriptedEngine(address) for address in addresses]
    connecting = asyncio.create_task(Replicas.connect(addresses))
    for engine in engines:
        assert await engine.heard() == Hello()
        await engine.say(READY)
    replicas = await connecting
    try:
        yield engines, replicas
    finally:
        await replicas.close()
        for engine in engines:
            engine.close()


def add(id: str, prompt: list[int], **params: int) -> Add:
    return Add(id, prompt, SamplingParams(**params))  # type: ignore[arg-type]  # by name


async def test_replicas_are_one_engine_of_the_sum_of_their_sizes(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (_, replicas):
        assert replicas.ready.max_sequences == 2 * READY.max_sequences
        assert replicas.ready.num_pages == 2 * READY.num_pages
        assert replicas.ready.max_model_len == READY.max_model_len
        assert replicas.alive


async def test_requests_go_to_different_engines_and_those_of_a_prefix_to_one(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        first, other = replicas.submit(add("a", [*DOCUMENT, 1])), replicas.submit(add("b", [2]))
        assert await engines[0].heard() == add("a", [*DOCUMENT, 1])
        assert await engines[1].heard() == add("b", [2])
        await engines[0].tell(Delta("a", 0, [5], "length"))
        await engines[1].tell(Delta("b", 0, [6], "length"))
        assert [deltas async for deltas in first] == [[Delta("a", 0, [5], "length")]]
        assert [deltas async for deltas in other] == [[Delta("b", 0, [6], "length")]]
        assert [replicas.router.under_way(number) for number in range(2)] == [0, 0]
        for number in range(3):
            replicas.submit(add(f"c{number}", [*DOCUMENT, number]))
            assert isinstance(await engines[0 if number < 2 else 1].heard(), Add)


async def test_prompts_of_other_processes_that_wait_in_an_engine_are_its_load(tmp_path: Path) -> None:
    """As many sequences in both, of longer prompts in the first."""
    async with engines_of(tmp_path) as (engines, replicas):
        for engine, tokens in zip(engines, (9000, 100), strict=True):
            await engine.say(Step([], Statistics(waiting=3, waiting_tokens=tokens)))
        for number in range(4):
            replicas.submit(add(f"{number}", [number]))
            assert isinstance(await engines[1].heard(), Add)
        assert [told.waiting_tokens for told in replicas.each_statistics] == [9000, 100]
        await engines[0].say(Fault("ended"))
        assert [told.waiting_tokens for told in replicas.each_statistics] == [0, 100]


async def test_a_request_that_had_nothing_yet_is_answered_by_another_replica(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [1, 2]))
        reading = asyncio.create_task(anext(stream))
        assert await engines[0].heard() == add("a", [1, 2])
        await engines[0].say(Fault("out of memory"))
        assert await engines[1].heard() == add("a", [1, 2])
        await engines[1].tell(Delta("a", 0, [5]))
        assert await reading == [Delta("a", 0, [5])]
        replicas.finish("a", 0, "stop")
        assert await engines[1].heard() == Finish("a", 0, "stop")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert replicas.alive
        assert replicas.router.under_way(1) == 0


async def test_an_answer_that_has_begun_ends_with_its_replica(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [1, 2]))
        await engines[0].heard()
        await engines[0].tell(Delta("a", 0, [5]))
        await anext(stream)
        await engines[0].say(Fault("out of memory"))
        with pytest.raises(EngineGone, match="out of memory"):
            await anext(stream)
        assert engines[1].heard_nothing()
        assert replicas.router.under_way(0) == 0


async def test_a_request_whose_time_is_over_is_not_sent_anew(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [1, 2]))
        await engines[0].heard()
        stream.expire()
        await engines[0].say(Fault("out of memory"))
        with pytest.raises((TimeoutError, EngineGone)):
            await anext(stream)
        assert engines[1].heard_nothing()


async def test_a_request_ends_no_third_engine(tmp_path: Path) -> None:
    async with engines_of(tmp_path, count=3) as (engines, replicas):
        stream = replicas.submit(add("a", [1, 2]))
        reading = asyncio.create_task(anext(stream))
        for engine in engines[:2]:
            await engine.heard()
            await engine.say(Fault("illegal address"))
        with pytest.raises(EngineGone, match="illegal address"):
            await reading
        assert engines[2].heard_nothing()
        replicas.submit(add("b", [3]))
        assert await engines[2].heard() == add("b", [3])


async def test_a_new_engine_takes_the_place_of_one_that_has_ended(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        for engine in engines:
            await engine.say(Fault("ended"))
        assert not replicas.alive
        with pytest.raises(EngineGone, match="0 is lost, 1 is lost"):
            replicas.submit(add("a", [1]))
        address = f"ipc://{tmp_path}/another.sock"
        another = ScriptedEngine(address)
        connecting = asyncio.create_task(EngineClient.connect(address))
        await another.heard()
        await another.say(READY)
        await replicas.clients[1].close()
        replicas.replace(1, await connecting)
        replicas.submit(add("a", [1]))
        assert await another.heard() == add("a", [1])
        another.close()


async def test_a_reader_that_leaves_aborts_its_request_where_it_is(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [1]))
        await engines[0].heard()
        with pytest.raises(ValueError, match="in use"):
            replicas.submit(add("a", [1]))
        await stream.aclose()
        assert await engines[0].heard() == Abort(["a"])
        await stream.aclose()
        assert replicas.router.load(0) == 0


async def test_a_vector_comes_from_another_replica_when_the_first_is_lost(tmp_path: Path) -> None:
    async with engines_of(tmp_path) as (engines, replicas):
        asked = Embed("a", [1, 2])
        embedding = asyncio.create_task(replicas.embed(asked))
        assert await engines[0].heard() == asked
        await engines[0].say(Fault("ended"))
        assert await engines[1].heard() == asked
        await engines[1].say(Embedding("a", b"\x00\x00\x80\x3f\x00\x00\x00\x00"))
        assert await embedding == [1.0, 0.0]
        assert replicas.router.load(1) == 0


async def test_a_drained_replica_finishes_what_it_has_and_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_SECONDS", 0.0)
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [*DOCUMENT, 1]))
        await engines[0].heard()
        replicas.drain(0)
        assert (replicas.standing(0), replicas.standing(1)) == (ReplicaState.DRAINING, ReplicaState.SERVING)
        assert not replicas.has_drained(0)
        with pytest.raises(LastReplica, match="replica 1 is the last"):
            replicas.drain(1)
        for number in range(3):  # though the other one holds their prefix
            replicas.submit(add(f"b{number}", [*DOCUMENT, number]))
            assert isinstance(await engines[1].heard(), Add)
        await engines[0].tell(Delta("a", 0, [5], "length"))
        assert [deltas async for deltas in stream] == [[Delta("a", 0, [5], "length")]]
        assert replicas.has_drained(0)
        await engines[1].say(Fault("ended"))
        assert replicas.alive
        assert not replicas.takes_requests
        with pytest.raises(EngineGone, match="0 is draining, 1 is lost"):
            replicas.submit(add("c", [3]))
        replicas.resume(0)
        assert replicas.takes_requests
        assert not replicas.has_drained(0)
        replicas.submit(add("d", [3]))
        assert await engines[0].heard() == add("d", [3])


async def test_ledgers_are_those_of_the_engines_that_answer(tmp_path: Path) -> None:
    """The other one ends while it is asked."""
    async with engines_of(tmp_path) as (engines, replicas):
        asking = asyncio.create_task(replicas.ledgers("a"))
        asked = [await engine.heard() for engine in engines]
        await engines[0].say(Fault("out of memory"))
        assert isinstance(asked[1], AskLedgers)
        await engines[1].say(Ledgers(asked[1].id, []))
        assert await asking == []
        await engines[1].say(Fault("out of memory"))
        with pytest.raises(EngineGone, match="no engine"):
            await replicas.ledgers("a")


async def test_a_request_asks_the_engine_that_has_it_for_its_ledger(tmp_path: Path) -> None:
    """The other one hears nothing of it, so it may be silent."""
    async with engines_of(tmp_path) as (engines, replicas):
        stream = replicas.submit(add("a", [1]))
        assert isinstance(await engines[0].heard(), Add)
        await engines[0].tell(Delta("a", 0, [5], "length"))
        assert [deltas async for deltas in stream] == [[Delta("a", 0, [5], "length")]]
        asking = asyncio.create_task(stream.client.ledgers(stream.id))
        asked = await engines[0].heard()
        assert isinstance(asked, AskLedgers)
        assert asked.name == "a"
        await engines[0].say(Ledgers(asked.id, []))
        assert await asking == []
        replicas.submit(add("b", [2]))
        assert await engines[1].heard() == add("b", [2])


def test_all_processes_see_it_and_one_that_starts_again_too(tmp_path: Path) -> None:
    first, second = ReplicaDrains(3, tmp_path), ReplicaDrains(3, tmp_path)
    first.drain(1, others=[0, 2])
    assert [second.drains(replica) for replica in range(3)] == [False, True, False]
    assert [ReplicaDrains(3, tmp_path).drains(replica) for replica in range(3)] == [False, True, False]
    second.resume(1)
    assert not first.drains(1)


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_that_takes_requests_is_not_drained(tmp_path: Path, shared: bool) -> None:
    drains = ReplicaDrains(3, tmp_path if shared else None)
    drains.drain(0, others=[1, 2])
    drains.drain(1, others=[0, 2])
    with pytest.raises(LastReplica, match="replica 2 is the last that takes requests: resume another one first"):
        drains.drain(2, others=[0, 1])
    drains.resume(0)
    drains.drain(2, others=[0, 1])
    with pytest.raises(LastReplica, match="replica 0"):
        drains.drain(0, others=[])  # the others have ended
    assert [drains.drains(replica) for replica in range(3)] == [False, True, True]
