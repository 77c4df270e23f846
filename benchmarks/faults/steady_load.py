"""A load that goes on while a server loses its ranks, and how its requests end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from strata.bench.load.connection import HttpClient
from strata.bench.load.send import LoadRequest, RequestOutcome, send_all


@dataclass(frozen=True)
class Endings:
    """How the requests of a load ended. answered: whole. failed: with an error that says why. lost: without a word.

    said: what the first that failed was told; None if none did.
    """

    answered: int
    failed: int
    lost: int
    said: str | None


class SteadyLoad:
    """Sends `requests` in turn, `rate` a second, from its making until `end`."""

    def __init__(self, client: HttpClient, requests: Sequence[LoadRequest], rate: float, timeout: float) -> None:
        """timeout: seconds after which a request is given up, and lost."""
        self._client, self._requests, self._timeout = client, requests, timeout
        self._outcomes: list[RequestOutcome] = []
        self._ending = asyncio.Event()
        self._sending = asyncio.create_task(self._send(1 / rate))

    @property
    def answered(self) -> int:
        """Requests that have been answered so far."""
        return sum(one.fault is None for one in self._outcomes)

    async def end(self) -> Endings:
        """Send no more, wait for those under way, and tell how all have ended."""
        self._ending.set()
        await self._sending
        faults = [one.fault for one in self._outcomes if one.fault is not None]
        lost = sum(fault.lost for fault in faults)
        said = next((fault.message for fault in faults if not fault.lost), None)
        return Endings(len(self._outcomes) - len(faults), len(faults) - lost, lost, said)

    async def _send(self, pause: float) -> None:
        async with asyncio.TaskGroup() as group:
            sent = 0
            while not self._ending.is_set():
                group.create_task(self._one(self._requests[sent % len(self._requests)]))
                sent += 1
                await asyncio.sleep(pause)

    async def _one(self, request: LoadRequest) -> None:
        self._outcomes += await send_all(self._client, [request], [0.0], max_concurrency=None, timeout=self._timeout)
