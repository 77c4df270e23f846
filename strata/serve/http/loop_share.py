"""How much of the event loop one caller's work may take, where the work cannot be left to a thread or a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_REST = 4.0  # times what the work took; so one caller takes a fifth of the loop at most


class LoopShare:
    """One caller's work items are done one after the other, with the loop left to others between them."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._rested: dict[str, float] = {}  # when a caller's next piece may be done

    @asynccontextmanager
    async def time_slice(self, caller: str) -> AsyncIterator[None]:
        """Do one item of work inside, all at once; a caller's own wait in the order in which they came."""
        async with self._turns.setdefault(caller, asyncio.Lock()):
            await asyncio.sleep(max(0.0, self._rested.get(caller, 0.0) - time.monotonic()))
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._rested[caller] = now + _REST * (now - began)
