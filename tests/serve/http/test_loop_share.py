"""One caller's work on the event loop leaves it to the others for longer than it takes."""

from __future__ import annotations

import asyncio
import time

from strata.serve.http.limits import LoopShare


async def test_a_caller_rests_longer_than_it_works_and_others_do_not_wait_for_it() -> None:
    share = LoopShare()
    done: list[str] = []

    async def work(caller: str) -> None:
        async with share.time_slice(caller):
            time.sleep(0.02)
            done.append(caller)

    start = time.monotonic()
    busy = [asyncio.create_task(work("a")) for _ in range(5)]
    await asyncio.sleep(0)
    await work("b")
    assert done.count("a") <= 1
    await asyncio.gather(*busy)
    assert time.monotonic() - start >= 5 * 0.02 + 4 * 0.08


async def test_work_that_fails_or_is_cancelled_keeps_nobody_waiting() -> None:
    share = LoopShare()
    for error in (ValueError, asyncio.CancelledError):
        try:
            async with share.time_slice("a"):
                raise error
        except (ValueError, asyncio.CancelledError):
            pass
    async with asyncio.timeout(10), share.time_slice("a"):
        pass
