"""Turns at helpers that only a few requests may use at once, such that no caller's work keeps another's waiting."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from strata.serve.http.limits import AdmittedRequest

Helper = TypeVar("Helper")
Result = TypeVar("Result")

AT_ONCE = 2  # helpers of a kind


class FairQueue(Generic[Helper]):
    """Callers take turns, each with what it has asked first; one caller alone never holds all helpers.

    How much a caller may have waiting here is bounded by its admissions. A turn lasts until its work is done, also when
    nobody waits for that any more: who asks and leaves gains nothing.
    """

    def __init__(self, helpers: Sequence[Helper]) -> None:
        self._idle = list(helpers)
        self._max_of_caller = max(1, len(helpers) - 1)
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[Helper]]] = {}  # whose turn is next comes first

    async def run(self, admission: AdmittedRequest, work: Callable[[Helper], Awaitable[Result]]) -> Result:
        """What `work` gives with a helper. Raises ApiError (408) if its turn has not come by the request's deadline."""
        caller = admission.caller.name
        if self._idle and self._working[caller] < self._max_of_caller:
            self._working[caller] += 1
            helper = self._idle.pop(0)
        else:
            helper = await self._acquire(caller, admission)
        working = asyncio.ensure_future(work(helper))
        working.add_done_callback(lambda done: self._done(caller, helper, done))
        return await asyncio.shield(working)

    async def _acquire(self, caller: str, admission: AdmittedRequest) -> Helper:
        turn: asyncio.Future[Helper] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            async with asyncio.timeout(admission.deadline - time.monotonic()):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the turn has come as the asker left
                self._release(caller, turn.result())
            if isinstance(error, TimeoutError):
                raise admission.timed_out() from None
            raise

    def _done(self, caller: str, helper: Helper, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # of work that nobody waits for any more
        self._release(caller, helper)

    def _release(self, caller: str, helper: Helper) -> None:
        """`caller` needs a helper no more."""
        self._working[caller] -= 1
        if not self._working[caller]:
            del self._working[caller]
        self._idle.insert(0, helper)
        for name, turns in list(self._waiting.items()):
            while turns and turns[0].done():  # given up
                turns.popleft()
            if turns and self._idle and self._working[name] < self._max_of_caller:
                self._working[name] += 1
                turns.popleft().set_result(self._idle.pop(0))
                self._waiting[name] = self._waiting.pop(name)  # behind the others
            if not turns:
                del self._waiting[name]
