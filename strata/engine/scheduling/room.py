"""How much of prompts a step takes beside its decodes: as much as keeps it short enough for those who read along."""

from __future__ import annotations

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
    """seconds: what a step with decodes is to take at most. times: how long steps take."""

    seconds: float
    times: StepTimes


class PromptRoom:
    """What a step with decodes has room for, as its prompts take it one after the other.

    decodes: their number. keys: tokens that they read, together. in_line: sequences that have prompts to compute.
    """

    def __init__(self, target: StepTarget, decodes: int, keys: int, in_line: int) -> None:
        self._times = times = target.times
        self._tokens, self._prompt_tokens = decodes, 0
        self._others = times.decodes(decodes, keys)
        alone = times.total(decodes, self._others)
        self._target = max(target.seconds, target.seconds * in_line / IN_LINE, MAX_SLOWDOWN * alone)

    def chunk(self, start: int, wanted: int, most: int, page_size: int) -> int:
        """How many of the next `wanted` tokens of a prompt, behind the first `start`, and of `most`, there is room for.

        If not for all that are wanted, they end with a page, or there is none; but the first prompt always gets some.
        """
        least = max(0, LEAST_TOKENS - self._prompt_tokens)
        count = min(wanted, most, max(least, self._times.longest(self._target, self._tokens, self._others, start)))
        if count == wanted:
            return count
        whole_pages = (start + count) // page_size * page_size - start
        if whole_pages > 0:
            return whole_pages
        return 0 if self._prompt_tokens else count

    def take(self, start: int, count: int) -> None:
        """Such a chunk runs in the step."""
        self._tokens += count
        self._prompt_tokens += count
        self._others += self._times.chunk(start, count)
