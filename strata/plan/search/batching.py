"""A load on an engine with continuous batching: how long requests wait and how fast their tokens come, on average.

Each step decodes for every sequence that has its first token, and takes chunks of prompts beside them. In a steady load
as many requests end as begin, so the steps in which an answer's tokens come have, on average, the tokens of as many
prompts as answers end (Little's law); what is left are the shares of steps with and without prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from strata.engine.scheduling.prompt_budget import MAX_SLOWDOWN, MIN_TOKENS, SERVER_TTFT_MS
from strata.plan.search.traffic import Traffic

# From a request's way over HTTP until its first token is on its way back, beside the steps: what the first tokens of
# four loads of one request at a time took longer on an H200 than the predicted steps of their prompts, 1.9 to 3.2 ms
# (0.6B and 8B, cached and not, benchmarks/results/h200_peers.jsonl).
SERVER_SECONDS = 2.7e-3
_LEAST, _PRECISION = 1e-6, 1e-4
_FEW_TOKENS = 8.0
_PARTS = 32  # numbers of sequences, for which a load is asked for
_BUSIEST = 0.999

StepSeconds = Callable[[float, float], float]
"""Of a stage, by decoding sequences and tokens of prompts."""


@dataclass(frozen=True)
class Batching:
    """How an engine fills its steps. budget: most tokens of one; target: seconds that one is to take at most beside
    decodes, None: none. stages: steps that are under way at once. ranks: that have sequences of their own, whose steps
    take as long as the longest of them.
    """

    budget: int
    target: float | None
    stages: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class LoadPoint:
    """A steady load on one engine.

    requests: a second. ttft, tpot: mean seconds. decoding: sequences that decode at a time, of `concurrency` under way.
    prompt_steps: share of the steps that have prompts, of `chunk` tokens; step: seconds of a mean one. waiting: what of
    ttft a request waits for a place, where they come independently of each other. filled: share of the room that steps
    have for prompts.
    """

    concurrency: float
    decoding: float
    requests: float
    ttft: float
    tpot: float
    prompt_steps: float
    chunk: float
    step: float
    waiting: float = 0.0
    filled: float = 1.0


def at_concurrency(seconds: StepSeconds, traffic: Traffic, batching: Batching, concurrency: int) -> LoadPoint:
    """So many requests are under way at all times: when one ends, another comes."""
    if traffic.output <= 1:
        return _prompts_alone(seconds, traffic, batching, concurrency)
    steady = partial(_steady, seconds, traffic, batching, 1 - 1 / concurrency)

    def is_within(point: LoadPoint) -> bool:
        return point.concurrency <= concurrency

    found = _most(steady, float(concurrency), is_within)
    # More than the steps have room for wait in line.
    waiting = max(0.0, concurrency - found.concurrency)
    return replace(found, concurrency=concurrency, ttft=found.ttft + waiting / found.requests)


def at_rate(seconds: StepSeconds, traffic: Traffic, batching: Batching, rate: float, most: int) -> LoadPoint | None:
    """So many requests a second come, independently of each other; None if they are more than `most` sequences at once,
    or than the steps have room for, let end."""
    if traffic.output <= 1:
        return _prompts_at_rate(seconds, traffic, batching, rate)
    steady = partial(_steady, seconds, traffic, batching, 1.0)
    found = _most(steady, float(most), lambda point: point.requests <= rate)
    if found.requests < rate * (1 - 1e-3) or found.concurrency > most:
        return None
    wait = wait_for_place(steady, most, rate)
    if wait is None:
        return None
    return replace(found, concurrency=found.concurrency + rate * wait, ttft=found.ttft + wait, waiting=wait)


def wait_for_place(steady: Callable[[float], LoadPoint | None], most: int, rate: float) -> float | None:
    """Mean seconds until one of `most` places is free for a request; None if more come than end.

    How many are there is a birth-death chain (Kleinrock 1975, chapter 3): they come at random, and end as fast as so
    many under way let them; more than `most` as fast as these. steady: of so many that decode.
    """
    full = _most(steady, float(most), lambda point: True)  # more find no room in the steps for their prompts
    parts = (steady(full.decoding * part / _PARTS) for part in range(1, _PARTS))
    known = [(0.0, 0.0), *((one.concurrency, one.requests) for one in (*parts, full) if one is not None)]
    places, rates = zip(*known, strict=True)
    ended = np.interp(np.arange(1, most + 1), places, rates)
    load = rate / float(ended[-1])
    if load >= 1:
        return None
    chances = np.cumsum(np.log(rate / ended))
    weights = np.exp(np.append(0.0, chances) - max(0.0, chances.max()))
    beyond = weights[-1] * load / (1 - load)
    waiting = beyond / (1 - load) / (weights.sum() + beyond)  # requests, on average
    return float(waiting / rate)


def _most(
    steady: Callable[[float], LoadPoint | None], most: float, is_within: Callable[[LoadPoint], bool]
) -> LoadPoint:
    """With as many sequences that decode as a bound allows."""
    full = steady(most)
    if full is not None and is_within(full):
        return full
    low, high = _LEAST, most
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        point = steady(middle)
        low, high = (middle, high) if point is not None and is_within(point) else (low, middle)
    found = steady(low)
    assert found is not None, "a step has room for the prompts of next to no sequences"
    return found


def _steady(
    seconds: StepSeconds, traffic: Traffic, batching: Batching, others: float, decoding: float
) -> LoadPoint | None:
    """With so many sequences decoding; None if the prompts that take their places do not fit into the steps.

    others: of those that decode on average, the share that a request sees beside itself: all where requests come
    independently, all but one where there is always the same number (Reiser and Lavenberg 1980).
    """
    stages, ranks = batching.stages, batching.ranks
    mean = decoding / stages / ranks  # of a step and a rank
    own = 1 + others * mean
    after_first = traffic.output - 1
    ended = mean / after_first  # of a step and a rank; as many begin
    wanted = ended * traffic.computed
    room = max(1.0, batching.budget - own)
    if wanted > room:
        return None
    alone = seconds(own, 0.0)
    longest = max(_longest(seconds, batching, own, alone, room), wanted)
    # Of those that came during a step, as many run in the next as there is room for.
    chunk = min(longest, wanted / -math.expm1(-ended))
    # A step is as long as that of the rank with prompts, so of several ranks' steps more have some.
    share = min(1.0, max(-math.expm1(-ended * ranks), wanted / chunk))
    with_prompts = seconds(own, chunk)
    step = share * with_prompts + (1 - share) * alone
    tpot = step * stages
    requests = decoding / (after_first * tpot)
    # A request comes in the middle of a step, of a long one rather than of a short one, and others with it.
    spread = (share * with_prompts**2 + (1 - share) * alone**2) / step
    beside = traffic.computed + wanted / step * spread
    first, rest = min(beside, longest), max(0.0, beside - longest)
    line = with_prompts * _queue(wanted / longest)
    if batching.target is not None:
        # Steps become as long as without a target where prompts would wait for longer than they are to.
        line = min(line, SERVER_TTFT_MS / 1e3 + seconds(own, room) * _queue(wanted / room))
    is_busy = -math.expm1(-others * mean) if others < 1 or mean < 1 else 1.0
    prefill = seconds(own, first) * stages + rest / longest * with_prompts
    ttft = SERVER_SECONDS + is_busy * spread / 2 + line + prefill
    under_way, filled = requests * (ttft + after_first * tpot), wanted / longest
    return LoadPoint(under_way, decoding, requests, ttft, tpot, share, chunk, step, filled=filled)


def _queue(busy: float) -> float:
    """How many steps a prompt waits for others before it: as in a queue whose work comes at random and takes equally
    long (M/D/1), beyond the rest of a step."""
    busy = min(busy, _BUSIEST)
    return busy * busy / (2 * (1 - busy))


def _longest(seconds: StepSeconds, batching: Batching, own: float, alone: float, room: float) -> float:
    """Most tokens of prompts beside so many decodes: what the target leaves, as `PromptBudget` has it."""
    if batching.target is None:
        return room
    # The target is for a token's way through all stages.
    target = max(batching.target / batching.stages, MAX_SLOWDOWN * alone)
    if seconds(own, room) <= target:
        return room
    low, high = 0.0, room
    while high - low > _FEW_TOKENS:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(own, middle) <= target else (low, middle)
    return min(room, max(low, MIN_TOKENS))


def _prompts_alone(seconds: StepSeconds, traffic: Traffic, batching: Batching, concurrency: int) -> LoadPoint:
    """Answers of one token: each step has as many prompts as it has room for."""
    own = concurrency / batching.stages / batching.ranks
    chunk = min(batching.budget, max(1.0, own) * traffic.computed)
    step = seconds(0.0, chunk)
    most = chunk / traffic.computed / step * batching.ranks
    # The next comes as one ends, which is when it is through all stages and back over HTTP.
    requests = min(most, concurrency / (step * batching.stages + SERVER_SECONDS))
    return LoadPoint(concurrency, 0.0, requests, concurrency / requests, 0.0, 1.0, chunk, step)


def _prompts_at_rate(seconds: StepSeconds, traffic: Traffic, batching: Batching, rate: float) -> LoadPoint | None:
    """One prompt after another waits for those before it (M/D/1, DistServe, Zhong et al. 2024)."""
    chunk = min(batching.budget, traffic.computed)
    step = seconds(0.0, chunk)
    service = step * traffic.computed / chunk / batching.ranks
    busy = rate * service
    if busy >= 1:
        return None
    wait = rate * service**2 / (2 * (1 - busy))
    ttft = SERVER_SECONDS + wait + service * batching.ranks + step * (batching.stages - 1)
    return LoadPoint(rate * ttft, 0.0, rate, ttft, 0.0, busy, chunk, step)
