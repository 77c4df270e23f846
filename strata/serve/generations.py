"""Several generations at once, each read as far as its reader takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from strata.serve.generation import Generation, Piece


async def as_they_come(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """(which generation, its pieces) in the order in which they come; what a slow reader leaves there gathers there.

    Raises what any of them raises. Does not close them.
    """
    if len(generations) == 1:
        async for pieces in generations[0]:
            yield 0, pieces
        return
    nexts = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(generations)}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = nexts.pop(task)
                try:
                    pieces = task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(generations[number]))] = number
                yield number, pieces
    finally:
        for task in nexts:
            task.cancel()
        if nexts:
            await asyncio.wait(nexts)
