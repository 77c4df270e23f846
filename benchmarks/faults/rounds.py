"""Rounds in which one rank of a server is killed or stopped while requests come, and what is found of each."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.faults.processes import EngineProcesses, Process, engine_of, is_there
from benchmarks.faults.server import served
from benchmarks.faults.steady_load import SteadyLoad
from strata.bench.load.connection import ConnectionCut, HttpClient
from strata.bench.load.request_sets import EvenLengths, RandomSet, encode
from strata.bench.load.send import run
from strata.bench.load.server import find_model, text_ids
from strata.hardware.gpu_memory import GpuMemories
from strata.text.counted import counted

LENGTHS = EvenLengths(prompt=64, output=64)
# Before the fault, and after the server is ready again, requests come for so long.
_CALM_SECONDS = 0.5
# What was ended has so long to be gone.
_GONE_SECONDS = 5.0
# After which a server is not expected to be ready again, and a request is lost.
_MAX_SECONDS = 180.0
_POLL_SECONDS = 0.05
# By which the memory of GPUs may differ though nothing is left: the driver's own, of other processes.
MEMORY_TOLERANCE = 256 << 20


@dataclass(frozen=True)
class FaultTest:
    """arguments: of `strata serve`. ranks: of its engine. rate: requests a second."""

    arguments: list[str]
    ranks: int
    rounds: int
    rate: float


@dataclass(frozen=True)
class FaultRound:
    """What one fault did. Times in seconds from the signal.

    noticed: until /ready was 503; ready: until it was 200 again; None if it never was. fault: what a request was told.
    answered, failed, lost: requests, see `Endings`. answered_after: those whose answer ended after `ready`.
    processes_left: of the engine that was hit, after the server was ready again. memory_left: the most bytes that a
    GPU had in use at least, between the two engines, beyond those before the server; None where no driver tells.
    """

    round: int
    rank: int
    signal: str
    noticed: float | None
    ready: float | None
    fault: str | None
    answered: int
    failed: int
    lost: int
    answered_after: int
    processes_left: int
    memory_left: int | None
    test: str = field(default="fault", init=False)

    def faults(self) -> Iterator[str]:
        """What must not be, in words."""
        if self.noticed is None:
            yield "the fault was not noticed"
        elif self.ready is None:
            yield f"the server was not ready again after {_MAX_SECONDS:g} s"
        elif not self.answered_after:
            yield "no request was answered once the server was ready again"
        if self.lost:
            yield f"{counted(self.lost, 'request')} lost"
        if self.processes_left:
            yield f"{counted(self.processes_left, 'process', 'processes')} left"
        if self.memory_left is not None and self.memory_left > MEMORY_TOLERANCE:
            yield f"{self.memory_left / 2**30:.2f} GiB of a GPU's memory were left"

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        noticed, ready = ("never" if one is None else f"{one:.2f} s" for one in (self.noticed, self.ready))
        memory = "" if self.memory_left is None else f", {self.memory_left / 2**30:.2f} GiB left"
        return (
            f"round {self.round}, rank {self.rank} {self.signal}: noticed {noticed}, ready again {ready}; requests: "
            f"{self.answered} answered, {self.failed} ended with an error, {self.lost} lost; {self.processes_left} "
            f"processes{memory}; {self.fault}"
        )


@dataclass(frozen=True)
class FaultSummary:
    """All rounds, and the end of the server. slowest: seconds of the latest `ready`. wrong: what must not be, in words.
    exit_code, processes_left: of the server."""

    rounds: int
    slowest: float | None
    answered: int
    failed: int
    lost: int
    exit_code: int | None
    processes_left: int
    memory_left: int | None
    wrong: list[str]
    seconds: float
    test: str = field(default="faults", init=False)

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        slowest = "-" if self.slowest is None else f"{self.slowest:.1f} s"
        said = "; ".join(self.wrong) or "nothing hung, leaked or was lost"
        return (
            f"{counted(self.rounds, 'round')} in {self.seconds:.0f} s, ready again after {slowest} at most; requests: "
            f"{self.answered} answered, {self.failed} ended with an error, {self.lost} lost: {said}"
        )


def run_rounds(test: FaultTest, show: Callable[[FaultRound], None]) -> FaultSummary:
    """Start a server and play the rounds, each shown as it ends; a server that does not come back ends them.

    Raises ValueError if the server does not start.
    """
    start, memories = time.monotonic(), GpuMemories.of_this_process()
    before = _used(memories)
    found: list[FaultRound] = []

    async def play() -> None:
        async for one in _rounds(test, server.process.pid, server.url, memories, before):
            found.append(one)
            show(one)

    with served(test.arguments) as server:
        run(play())
    memory = _above(_used(memories), before)
    wrong = [f"round {one.round}: {fault}" for one in found for fault in one.faults()]
    if server.exit_code != 0:
        wrong.append(f"the server ended with exit code {server.exit_code}")
    if server.left:
        wrong.append(f"{counted(server.left, 'process', 'processes')} of the server left")
    if memory is not None and memory > MEMORY_TOLERANCE:
        wrong.append(f"the server left {memory / 2**30:.2f} GiB of a GPU's memory")
    return FaultSummary(
        rounds=len(found),
        slowest=max((one.ready for one in found if one.ready is not None), default=None),
        answered=sum(one.answered for one in found),
        failed=sum(one.failed for one in found),
        lost=sum(one.lost for one in found),
        exit_code=server.exit_code,
        processes_left=server.left,
        memory_left=memory,
        wrong=wrong,
        seconds=time.monotonic() - start,
    )


def hit(number: int, ranks: int) -> tuple[int, signal.Signals]:
    """Rank and signal of a round: every rank is killed, then every rank is stopped, and so on."""
    return number % ranks, (signal.SIGKILL, signal.SIGSTOP)[number // ranks % 2]


async def _rounds(
    test: FaultTest, server: int, url: str, memories: GpuMemories, before: list[int]
) -> AsyncIterator[FaultRound]:
    client = HttpClient(url)
    try:
        model = await find_model(client, None)
        asks = RandomSet(LENGTHS, await text_ids(client, model.name)).asks(64, 0)
        requests = [encode(ask, model.name) for ask in asks]
        for number in range(test.rounds):
            rank, what = hit(number, test.ranks)
            engine = engine_of(server)
            if engine is None or len(engine.ranks) != test.ranks:
                raise RuntimeError(f"the engine has not the {test.ranks} ranks that were asked for: {engine}")
            load = SteadyLoad(client, requests, test.rate, _MAX_SECONDS)
            memory = _LeastMemory(memories, before)
            found = await _round(client, load, engine, number, rank, what, memory)
            yield found
            if found.ready is None:
                return
    finally:
        client.close()


async def _round(
    client: HttpClient,
    load: SteadyLoad,
    engine: EngineProcesses,
    number: int,
    rank: int,
    what: signal.Signals,
    memory: _LeastMemory,
) -> FaultRound:
    await asyncio.sleep(_CALM_SECONDS)
    start = time.monotonic()
    os.kill(engine.ranks[rank].pid, what)
    noticed = await _until(client, 503, start)
    watching = asyncio.create_task(_until(client, 200, start))
    while not watching.done():
        await asyncio.to_thread(memory.look)
        await asyncio.wait([watching], timeout=_POLL_SECONDS)
    ready = await watching if noticed is not None else None
    before = load.answered
    await asyncio.sleep(_CALM_SECONDS)
    endings = await load.end()
    return FaultRound(
        round=number + 1,
        rank=rank,
        signal=what.name,
        noticed=noticed,
        ready=ready,
        fault=endings.said,
        answered=endings.answered,
        failed=endings.failed,
        lost=endings.lost,
        answered_after=endings.answered - before,
        processes_left=await _left(engine.all),
        memory_left=memory.left,
    )


async def _until(client: HttpClient, wanted: int, start: float) -> float | None:
    """Seconds from `start` until the server answers /ready so; None if it does not for too long."""
    while time.monotonic() - start < _MAX_SECONDS:
        try:
            if (await client.call("/ready"))[0] == wanted:
                return time.monotonic() - start
        except (OSError, ConnectionCut):
            pass  # asked again
        await asyncio.sleep(_POLL_SECONDS)
    return None


async def _left(processes: list[Process]) -> int:
    deadline = time.monotonic() + _GONE_SECONDS
    while (left := sum(map(is_there, processes))) and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return left


class _LeastMemory:
    """The least that GPUs had in use whenever it was looked. before: what they had before the server."""

    def __init__(self, memories: GpuMemories, before: list[int]) -> None:
        self._memories, self._before = memories, before
        self._least: list[int] | None = None

    def look(self) -> None:
        used = _used(self._memories)
        self._least = used if self._least is None else [min(two) for two in zip(self._least, used, strict=False)]

    @property
    def left(self) -> int | None:
        """The most bytes by which that of a GPU is above what it was before; None where no driver tells."""
        return _above(self._least or [], self._before)


def _used(memories: GpuMemories) -> list[int]:
    return [memory.used for memory in memories.read()]


def _above(used: list[int], before: list[int]) -> int | None:
    """The most bytes by which a GPU has more in use than before; None where that is not known."""
    if not before or len(used) != len(before):
        return None
    return max(0, *(now - then for now, then in zip(used, before, strict=True)))
