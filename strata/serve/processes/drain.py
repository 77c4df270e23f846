"""The requests under way in one API process, which finish before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Drain:
    """begun: no further requests are taken."""

    def __init__(self) -> None:
        self.begun = False
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def under_way(self) -> int:
        return self._under_way

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is under way for as long as this is open."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until no request is under way, but no longer than this; says whether none is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._under_way == 0
