"""Work before the first request: what compiles or chooses kernels when it is first used does so while nobody waits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strata.cache.pages import PageAllocator
from strata.engine.loop import EngineLoop
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import Statistics
from strata.engine.scheduling.rank_schedulers import RankPages

# Lengths of prompts that fill a step and more, and of prompts that sum up to no round number, for which kernels are
# compiled apart.
_PROMPTS: tuple[tuple[int, ...], ...] = ((1024, 512, *(700,) * 10), (*(700,) * 7, 101))
# How many sequences decode beside a prompt that no captured step holds, for its length or because it is scored: kernels
# have tiles for numbers of rows.
_DECODING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHORT = 8
_OUTPUTS = 4
# Filters draw by other kernels, and log-probabilities from logits of another dtype.
_FILTERED: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
_SCORED: dict[str, Any] = {"prompt_logprobs": 1}
_SAMPLING: tuple[dict[str, Any], ...] = ({}, _FILTERED, {"logprobs": 1}, {"logprobs": 1, **_FILTERED})


def warm_up(
    loop: EngineLoop,
    pages: PageAllocator | RankPages,
    vocab_size: int,
    max_captured_tokens: int,
    kernels_are_ready: bool = False,
) -> None:
    """Run prompts as callers would send them, and forget all that would tell of them: pages and statistics.

    On a fresh machine it takes seconds, on one with compiled kernels on its disk tenths of one.

    max_captured_tokens: of the largest steps that replay a CUDA graph; 0 if none does.
    kernels_are_ready: all variants of own kernels; steps that differ in nothing else are left out.
    """
    scheduler = loop.scheduler
    config = scheduler.config
    room = min(config.max_length, pages.num_pages // config.ranks * pages.page_size)
    outputs = min(_OUTPUTS, room - 1)
    if not outputs:  # no request fits
        return
    longest = min(room - outputs, config.max_tokens)
    whole, rest = divmod(min(max_captured_tokens + 1, config.max_tokens), longest)
    uncaptured = (*(longest,) * whole, *(rest,) * (rest > 0))  # prompts of more tokens than a captured step has
    if kernels_are_ready and max_captured_tokens >= config.max_tokens:  # there is no such step
        uncaptured = ()
    numbers = itertools.count()

    def add(lengths: Sequence[int], **sampling: Any) -> None:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, **sampling)
        for length, number in zip(lengths, numbers, strict=False):
            prompt = tuple(id % vocab_size for id in range(number, number + min(length, longest)))
            name = f"warm-up {number}"
            loop.add(Request(name, prompt, params, salt=name))  # a prefix found in the cache would shorten the step

    def drain() -> None:
        for _ in loop.outputs():
            pass

    scheduler.config = replace(config, target=None)  # long prompts beside decodes are divided otherwise
    for lengths in _PROMPTS:
        add(lengths)
        drain()
    for sampling in _SAMPLING:
        for lengths in ((_SHORT,), uncaptured):
            add(lengths, **sampling)
            drain()
    eager: list[tuple[tuple[int, ...], dict[str, Any]]] = [((_SHORT,), _SCORED)]
    if max_captured_tokens < config.max_tokens:
        eager.append((uncaptured, {}))
    for count in () if kernels_are_ready else _DECODING:
        for lengths, sampling in eager:
            if count < config.max_sequences:
                add((_SHORT,) * count)
                loop.step()
                loop.step()
                add(lengths, **sampling)
                drain()
    scheduler.reset()
    scheduler.config, scheduler.statistics = config, Statistics()
