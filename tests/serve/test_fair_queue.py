"""Turns at helpers: on events of the test's own, so that nothing depends on how fast the machine is."""

from __future__ import annotations

import asyncio

import pytest

from strata.serve.fair_queue import FairQueue
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest, Caller, Limits
from strata.serve.settings import ServeSettings


def admission(name: str, seconds: float = 600.0) -> AdmittedRequest:
    limits = Limits(ServeSettings("model", ("model",), request_timeout=seconds), 100)
    return limits.admit(Caller(name, ""), 1, 1)


class Work:
    """Pieces of work that last until they are told to end; `begun` has them in the order in which they began."""

    def __init__(self, helpers: int) -> None:
        self.queue = FairQueue([f"helper {number}" for number in range(helpers)])
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def ask(self, name: str, seconds: float = 600.0) -> asyncio.Task[str]:
        """Ask for a piece of work; the first letter is its caller's."""
        self._ends[name] = asyncio.Event()

        async def work(helper: str) -> str:
            self.begun.append(name)
            await self._ends[name].wait()
            return helper

        return asyncio.create_task(self.queue.run(admission(name[0], seconds), work))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_caller_never_holds_all_helpers() -> None:
    work = Work(helpers=2)
    tasks = [work.ask(f"a{number}") for number in range(5)]
    await settle()
    assert work.begun == ["a0"]
    tasks.append(work.ask("b0"))
    await settle()
    assert work.begun == ["a0", "b0"]
    for name in ("a0", "a1", "a2", "a3", "a4", "b0"):
        await work.end(name)
    assert len({await task for task in tasks}) <= 2


async def test_callers_take_turns_each_with_its_first() -> None:
    work = Work(helpers=1)
    tasks = [work.ask(name) for name in ("a0", "a1", "a2", "b0", "b1", "c0")]
    await settle()
    for name in ("a0", "a1", "b0", "c0", "a2", "b1"):
        assert work.begun[-1] == name
        await work.end(name)
    await asyncio.gather(*tasks)


async def test_a_helper_is_busy_until_its_work_is_done_though_the_asker_has_left() -> None:
    work = Work(helpers=2)
    left = work.ask("a0")
    await settle()
    left.cancel()
    later = work.ask("a1")
    await settle()
    assert work.begun == ["a0"]
    await work.end("a0")
    assert work.begun == ["a0", "a1"]
    await work.end("a1")
    await later


async def test_who_leaves_the_queue_loses_its_turn_and_nobody_elses() -> None:
    work = Work(helpers=1)
    first, second, third = (work.ask(name) for name in ("a0", "a1", "a2"))
    await settle()
    second.cancel()
    await work.end("a0")
    assert work.begun == ["a0", "a2"]
    await work.end("a2")
    await asyncio.gather(first, third)
    # Left at the very moment in which the turn came: the helper goes on to the next.
    fourth, fifth, sixth = (work.ask(name) for name in ("b0", "b1", "b2"))
    await settle()
    work._ends["b0"].set()
    await fourth
    fifth.cancel()
    await settle()
    work._ends["b1"].set()
    await work.end("b2")
    assert await sixth == "helper 0"


async def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    work = Work(helpers=1)
    holding = work.ask("a0")
    with pytest.raises(ApiError) as caught:
        await work.ask("b0", seconds=0.05)
    assert (caught.value.status, caught.value.code) == (408, "timeout")
    await work.end("a0")
    assert await holding == "helper 0"


async def test_what_fails_gives_its_helper_back() -> None:
    queue = FairQueue([1])

    async def fails(helper: int) -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await queue.run(admission("a"), fails)
