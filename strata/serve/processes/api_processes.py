"""Several API processes on one listening socket: the kernel gives each connection to one of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence

import msgspec

from strata.serve.client import EngineGone
from strata.serve.http.keys import KeyHash
from strata.serve.processes.child import Child, how_it_ended
from strata.serve.processes.worker import READY, ApiJob

MODULE = "strata.serve.processes.worker"
# A process that ends so soon after its start would do so again.
_SHORTEST_LIFE = 10.0
_STOP_SECONDS = 5.0  # by which a process may take longer to drain than it was told

_log = logging.getLogger("strata.serve")


class ApiProcesses:
    """`settings.api_workers` processes, with the methods of ApiServer. One that dies is started again.

    ended: done when one of them cannot be kept up.
    """

    def __init__(self, job: ApiJob) -> None:
        self._job = job
        self._children: dict[int, Child] = {}

    def set_keys(self, keys: Sequence[KeyHash]) -> None:
        """The keys that open the server from now on, in those that are started later, too."""
        self._job = msgspec.structs.replace(self._job, keys=list(keys))
        for child in self._children.values():
            child.tell(msgspec.json.encode(self._job.keys))

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Start them all; returns once all accept connections. Raises EngineGone if one ends instead."""
        self._listeners = tuple(listener.fileno() for listener in listeners)
        for listener in listeners:
            listener.set_inheritable(True)
        await self._start_one(0)  # alone: what is wrong with the job is said once
        others = range(1, self._job.settings.api_workers)
        await asyncio.gather(*(self._start_one(number) for number in others))
        self._keeping = [asyncio.create_task(self._keep(number)) for number in self._children]
        self.ended = asyncio.create_task(self._first_to_fail())

    async def drain(self, seconds: float) -> None:
        """Have each take no new requests and finish those under way; ends what takes longer than `seconds`."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*(child.stop(seconds + _STOP_SECONDS) for child in self._children.values()))

    async def _start_one(self, number: int) -> None:
        keys = self._job.keys
        job = msgspec.structs.replace(self._job, number=number, listeners=self._listeners)
        child = await Child.start(MODULE, msgspec.json.encode(job), pass_fds=self._listeners, talks=True)
        self._children[number] = child
        if self._job.keys is not keys:  # they have changed meanwhile
            child.tell(msgspec.json.encode(self._job.keys))
        if (await child.read_line()).decode().strip() != READY:
            raise EngineGone(f"API process {number} {how_it_ended(await child.ended)}")

    async def _keep(self, number: int) -> None:
        """Keep one of them up; returns when that is no use."""
        while True:
            started = time.monotonic()
            ended = self._children[number].ended
            await asyncio.wait((ended,))  # not `await ended`, which would cancel it with this task
            _log.error("API process %d %s", number, how_it_ended(ended.result()))
            if time.monotonic() - started < _SHORTEST_LIFE:
                return
            await self._start_one(number)

    async def _first_to_fail(self) -> None:
        await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
