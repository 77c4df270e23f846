"""How much of prompts a step takes beside its decodes: as much as keeps it short enough for those who read along."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from strata.engine.scheduling.step_times import StepTimes

# What a server's steps with decodes are to take at most, unless it is told: streams get 50 tokens a second, faster than
# anyone reads, and prompts still fill most of a step (8B reads its weights in 4 ms).
SERVER_TARGET_MS = 20.0
# Where decodes alone take longer than half of a target, a step may take so many times as long as they do alone.
MAX_SLOWDOWN = 2.0
# In short steps prompts take longer altogether, because each reads the weights again. With more of them in line than
# so many, their wait counts for more than the pace of streams, and the target grows in proportion: then batches that
# come at once lose less than 1 % (with 8 or more in line it would be over 1 %, for 128 prompts of 512 tokens on 8B).
IN_LINE = 6
# Prompt tokens that a step takes in any case, so that the first prompt gets on at any length. Fewer would hardly be
# faster: with so few rows, products take the time to read the weights.
LEAST_TOKENS = 256


@dataclass(frozen=True)
class StepTarget:
    """seconds: what a step with decodes is to take at most. times: how long steps take. sizes: tokens that steps with
    prompts are padded to, ascending; those with more than the last are not."""

    seconds: float
    times: StepTimes
    sizes: tuple[int, ...] = ()


class PromptRoom:
    """What a step with decodes has room for, as its prompts take it one after the other.

    decodes: their number. keys: tokens that they read, together. in_line: sequences that have prompts to compute.
    """

    def __init__(self, target: StepTarget, decodes: int, keys: int, in_line: int) -> None:
        self._times = times = target.times
        self._sizes = target.sizes
        self._tokens, self._prompt_tokens = decodes, 0
        self._others = times.decodes(decodes, keys)
        alone = times.undivided(decodes, self._others)
        self._target = max(target.seconds, target.seconds * in_line / IN_LINE, MAX_SLOWDOWN * alone)

    def chunk(self, start: int, wanted: int, most: int, page_size: int) -> int:
        """How many of the next `wanted` tokens of a prompt, behind the first `start`, and of `most`, there is room for.

        If not for all that are wanted, they end with a page, or there is none; but the first prompt always gets some.
        They leave less than a page of padding if that does not take more than they have to get in any case.
        """
        least = max(0, LEAST_TOKENS - self._prompt_tokens)
        count = min(wanted, most, max(least, self._times.longest(self._target, self._tokens, self._others, start)))
        if count == wanted:
            return count
        unpadded = self._whole_pages(start, self._unpadded(count), page_size)
        if unpadded >= max(1, least):
            return unpadded
        whole_pages = self._whole_pages(start, count, page_size)
        if whole_pages > 0:
            return whole_pages
        return 0 if self._prompt_tokens else count

    def _unpadded(self, count: int) -> int:
        """The most tokens up to `count` with which the step has a recorded size; `count` if it is larger than all."""
        place = bisect_right(self._sizes, self._tokens + count)
        return self._sizes[place - 1] - self._tokens if 0 < place < len(self._sizes) else count

    @staticmethod
    def _whole_pages(start: int, count: int, page_size: int) -> int:
        """As many of `count` tokens behind `start` as end with a page; negative if not even `start` does."""
        return (start + count) // page_size * page_size - start

    def take(self, start: int, count: int) -> None:
        """Such a chunk runs in the step."""
        self._tokens += count
        self._prompt_tokens += count
        self._others += self._times.chunk(start, count)
