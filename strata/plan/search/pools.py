"""Prompts and answers on engines of their own (DistServe, Zhong et al. 2024), which Strata does not have yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from strata.plan.search import search as search_module
from strata.plan.search.batching import SERVER_SECONDS
from strata.plan.search.layout import ServingLayout
from strata.plan.search.memory import needed_tokens
from strata.plan.search.search import Search

# Of the time of engines for prompts, how much is used: those that come at random wait twice as long as they take then.
_BUSY = 0.8
_BUDGET = 8192


@dataclass(frozen=True)
class Pools:
    """prompts, answers: layouts and numbers of engines. requests: a second, of all. ttft, tpot: seconds, the first with
    the way of keys and values over the network.
    """

    prompts: tuple[ServingLayout, int]
    answers: tuple[ServingLayout, int]
    sequences: int
    requests: float
    tokens: float
    ttft: float
    tpot: float

    @property
    def devices(self) -> int:
        """That work."""
        return sum(layout.ranks * count for layout, count in (self.prompts, self.answers))

    @property
    def line(self) -> str:
        """In words."""
        (first, some), (second, others) = self.prompts, self.answers
        return (
            f"prompts and answers on engines of their own: {some} x {first.name} and {others} x {second.name}, TTFT "
            f"{self.ttft * 1e3:,.1f} and TPOT {self.tpot * 1e3:,.2f} ms, {self.tokens:,.0f} tok/s, "
            f"{self.tokens / self.devices:,.0f} each"
        )

    def to_dict(self) -> dict[str, Any]:
        (first, some), (second, others) = self.prompts, self.answers
        return {
            "prompt_engines": some,
            "prompt_layout": first.name,
            "answer_engines": others,
            "answer_layout": second.name,
            "max_num_seqs": self.sequences,
            "ttft_ms": self.ttft * 1e3,
            "tpot_ms": self.tpot * 1e3,
            "tokens_per_second": self.tokens,
            "tokens_per_second_per_device": self.tokens / self.devices,
        }


@dataclass(frozen=True)
class _Part:
    """One engine: requests a second, and seconds of what it adds to a latency."""

    layout: ServingLayout
    requests: float
    seconds: float
    sequences: int = 0


def best_pools(search: Search, layouts: Iterable[ServingLayout]) -> Pools | None:
    """The most tokens a second within the objectives of two pools on the devices; None if there is none, or answers
    have one token."""
    question = search.question
    if question.traffic.output <= 1 or question.devices < 2:
        return None
    whole = [one for one in layouts if one.context == 1 and not one.own_tokens]
    prompts = list(_prompt_parts(search, whole))
    answers = [part for one in whole if (part := _answer_part(search, one)) is not None]
    found = [pair for first in prompts for second in answers for pair in _divided(search, first, second)]
    return max(found, key=lambda one: (one.tokens, -one.tpot), default=None)


def _prompt_parts(search: Search, layouts: Iterable[ServingLayout]) -> Iterator[_Part]:
    question = search.question
    traffic, machine = question.traffic, question.machine
    for layout in layouts:
        table = search.table(layout, search.question.precision)
        chunk = min(float(_BUDGET), traffic.computed)
        step = table.seconds(0, chunk)
        each = step * traffic.computed / chunk
        held = search.memory.held(layout, 1, _BUDGET, search.question.precision)
        # Each rank sends its part of the keys and values, and of fixed states.
        way = (traffic.prompt * held.token_bytes + held.state_bytes) / machine.network
        ttft = SERVER_SECONDS + each * (1 + _BUSY / (2 * (1 - _BUSY))) + step * (layout.stages - 1) + way
        if ttft <= (question.objectives.ttft or math.inf):
            yield _Part(layout, _BUSY / each, ttft)


def _answer_part(search: Search, layout: ServingLayout) -> _Part | None:
    """With as many sequences as memory and objective allow."""
    question, best = search.question, None
    table = search.table(layout, search.question.precision)
    for sequences in search_module.SEQUENCES:
        held = search.memory.held(layout, sequences, _BUDGET, search.question.precision)
        tpot = table.seconds(sequences / layout.stages, 0) * layout.stages
        if held.tokens < needed_tokens(question.traffic, sequences, held.page_size):
            break
        if tpot <= (question.objectives.tpot or math.inf):
            best = _Part(layout, sequences / ((question.traffic.output - 1) * tpot), tpot, sequences)
    return best


def _divided(search: Search, prompts: _Part, answers: _Part) -> Iterator[Pools]:
    """The devices between two pools, in every way."""
    devices, output = search.question.devices, search.question.traffic.output
    for some in range(1, devices // prompts.layout.ranks + 1):
        others = (devices - some * prompts.layout.ranks) // answers.layout.ranks
        if others:
            requests = min(some * prompts.requests, others * answers.requests)
            yield Pools(
                (prompts.layout, some), (answers.layout, others), answers.sequences, requests, requests * output,
                prompts.seconds, answers.seconds,
            )  # fmt: skip
