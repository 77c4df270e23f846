"""Several generations at once, each read as far as its reader takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from strata.serve.generation import Generation, SampleDelta


async def merged_streams(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[SampleDelta]], None]:
    """(which generation, its deltas) in the order in which they come; what a slow reader leaves there gathers there.

    Raises what any of them raises. Does not close them.
    """
    if len(generations) == 1:
        async for deltas in generations[0]:
            yield 0, deltas
        return
    nexts = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(generations)}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = nexts.pop(task)
                try:
                    deltas = task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(generations[number]))] = number
                yield number, deltas
    finally:
        for task in nexts:
            task.cancel()
        if nexts:
            await asyncio.wait(nexts)
