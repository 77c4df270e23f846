"""How much of prompts a step takes beside its decodes: as much as keeps it short enough for those who read along."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from strata.cost.step_times import StepTimes

# What a server aims at unless it is told, in ms. Steps with decodes of 20: streams get 50 tokens a second, faster than
# anyone reads, and prompts still fill most of a step (8B reads its weights in 4 ms). And prompts that are read within
# 300 (docs/engine.md has what others come to).
SERVER_TPOT_MS, SERVER_TTFT_MS = 20.0, 300.0
# Where decodes alone take a large part of a target, a step may take so many times as long as they do alone. With 2, 8B
# cuts prompts of 512 behind 6,000 in two beside 37 long decodes: TTFT of 55 ms on an H200 for 40, TPOT 12.6 for 11.6.
MAX_SLOWDOWN = 2.5
# Prompt tokens that a step takes in any case, so that the first prompt gets on at any length. Fewer would hardly be
# faster: with so few rows, products take the time to read the weights.
MIN_TOKENS = 256


@dataclass(frozen=True)
class StepTarget:
    """seconds: what a step with decodes is to take at most, as long as each prompt in line is read within `wait`
    seconds. times: how long steps take. sizes: tokens that steps with prompts are padded to, ascending; those with more
    than the last are not. padded: (keys, tokens): a step with a prompt behind so many keys is padded to so many tokens
    at least."""

    seconds: float
    times: StepTimes
    sizes: tuple[int, ...] = ()
    wait: float = SERVER_TTFT_MS / 1e3
    padded: tuple[int, int] | None = None


class InLine(NamedTuple):
    """A sequence whose prompt is to be read, and nothing but other prompts keeps it from that. computed: tokens of it;
    left: tokens to compute; waited: for so many seconds now."""

    computed: int
    left: int
    waited: float


class PromptBudget:
    """What a step with decodes has room for, as its prompts take it one after the other.

    Of each step the overhead (its decodes, and what it takes however much it runs) serves no prompt: steps of s seconds
    read prompts at 1 - overhead / s of the rate at which steps without bound do. A prompt, with those before it, needs
    `work` seconds at that rate, and is to be read `left` seconds from now; it is if s is overhead / (1 - work / left).
    So long the step may take, where that is more than target.seconds: the more the later a prompt is, and without bound
    if it is too late. Then steps are those of plain chunked prefill, so arrivals that it can follow are followed: the
    line is never longer than there by more than what is read in target.wait.

    decodes: their number. keys: tokens that they read, together. in_line: in the order in which prompts are read.
    """

    def __init__(self, target: StepTarget, decodes: int, keys: int, in_line: Iterable[InLine]) -> None:
        self._times = times = target.times
        self._sizes, self._padded = target.sizes, target.padded
        self._tokens, self._prompt_tokens = decodes, 0
        self._others = times.decodes(decodes, keys)
        alone = times.undivided(decodes, self._others)
        spare = self._spare(in_line, target.wait)
        in_time = times.overhead(decodes, self._others) / spare if spare > 0 else math.inf
        self._target = max(target.seconds, in_time, MAX_SLOWDOWN * alone)

    def _spare(self, in_line: Iterable[InLine], wait: float) -> float:
        """The share of their time that steps may spend on other things than prompts; 0 if none."""
        work, spare = 0.0, 1.0
        for sequence in in_line:
            work += self._times.prompt(sequence.computed, sequence.left)
            left = wait - sequence.waited
            if work >= left:  # a line can be long
                return 0.0
            spare = min(spare, 1 - work / left)
        return spare

    def chunk(self, start: int, wanted: int, most: int, page_size: int) -> int:
        """How many of the next `wanted` tokens of a prompt, behind the first `start`, and of `most`, there is room for.

        If not for all that are wanted, they end with a page, or there is none; but the first prompt always gets some.
        They leave less than a page of padding if that does not take more than they have to get in any case.
        """
        least = max(0, self._least(start) - self._prompt_tokens)
        fitting = most
        if self._target < math.inf:
            fitting = max(least, self._times.longest(self._target, self._tokens, self._others, start))
        count = min(wanted, most, fitting)
        if count == wanted:
            return count
        unpadded = self._whole_pages(start, self._unpadded(count), page_size)
        if unpadded >= max(1, least):
            return unpadded
        whole_pages = self._whole_pages(start, count, page_size)
        if whole_pages > 0:
            return whole_pages
        return 0 if self._prompt_tokens else count

    def _least(self, start: int) -> int:
        """The tokens that a step takes of a prompt behind `start`, if it is the first: fewer would be no faster."""
        if self._padded is None or start < self._padded[0]:
            return MIN_TOKENS
        return max(MIN_TOKENS, self._padded[1] - self._tokens + self._prompt_tokens)

    def _unpadded(self, count: int) -> int:
        """The most tokens up to `count` with which the step has a captured size; `count` if it is larger than all."""
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
