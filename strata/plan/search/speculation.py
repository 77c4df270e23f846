"""Tokens that are guessed and then verified together (Leviathan et al. 2023), which Strata does not do yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from strata.plan.search import search as search_module
from strata.plan.search.batching import Batching, LoadPoint, at_concurrency
from strata.plan.search.choice import ServingChoice
from strata.plan.search.search import Search
from strata.plan.search.step_table import Anchors, StepTable
from strata.text.counted import counted

_MOST_GUESSES = 7


@dataclass(frozen=True)
class Speculation:
    """guesses: tokens ahead of a verified one. point: of each engine; tokens: a second, of all."""

    acceptance: float
    guesses: int
    sequences: int
    point: LoadPoint
    tokens: float
    devices: int

    @property
    def line(self) -> str:
        """In words."""
        return (
            f"speculation, {self.guesses} guesses that cost nothing, each right with {self.acceptance:.0%}: "
            f"{counted(self.sequences, 'sequence')}, "
            f"TTFT {self.point.ttft * 1e3:,.1f} and TPOT {self.point.tpot * 1e3:,.2f} ms, "
            f"{self.tokens:,.0f} tok/s, {self.tokens / self.devices:,.0f} each"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance,
            "guesses": self.guesses,
            "max_num_seqs": self.sequences,
            "ttft_ms": self.point.ttft * 1e3,
            "tpot_ms": self.point.tpot * 1e3,
            "tokens_per_second": self.tokens,
            "tokens_per_second_per_device": self.tokens / self.devices,
        }


def accepted(acceptance: float, guesses: int) -> float:
    """Tokens that a verification gives on average, the one behind the last right guess included: the sum of
    acceptance ** i for i from 0 to `guesses`."""
    return float(sum(acceptance**count for count in range(guesses + 1)))


def best_speculation(search: Search, best: ServingChoice, acceptance: float) -> Speculation | None:
    """The most tokens a second within the objectives on the layout of the best; None if there is none, or answers have
    one token. acceptance: of each guess, in [0, 1)."""
    if search.question.traffic.output <= 1:
        return None
    found = [one for one in _tried(search, best, acceptance) if _meets(search, one)]
    return max(found, key=lambda one: (one.tokens, -one.point.tpot), default=None)


def _tried(search: Search, best: ServingChoice, acceptance: float) -> Iterator[Speculation]:
    settings, question = best.settings, search.question
    layout, traffic = settings.layout, question.traffic
    table = search.table(layout, settings.precision)
    # A verification has more tokens than sequences, but reads the keys and values of each sequence once.
    short = Anchors(search.anchors(layout).prices, replace(traffic, context=1.0), [settings.precision])
    tokens = StepTable(short, question.config, layout, settings.precision)
    ranks = layout.tensor if layout.own_tokens else 1
    for guesses in range(1, _MOST_GUESSES + 1):
        each = accepted(acceptance, guesses)
        fewer = replace(traffic, output=1 + (traffic.output - 1) / each)

        def seconds(own: float, prompts: float, more: int = guesses + 1) -> float:
            grown = tokens.seconds(own * more, 0) - tokens.seconds(own, 0)
            return table.seconds(own, prompts) + grown

        for sequences in search_module.SEQUENCES:
            if search.choice(replace(settings, sequences=sequences)) is None:
                break
            batching = Batching(settings.budget, settings.target / 1e3 or None, layout.stages, ranks)
            point = at_concurrency(seconds, fewer, batching, sequences * ranks)
            point = replace(point, tpot=point.tpot / each)
            total = best.replicas * point.requests * traffic.output
            yield Speculation(acceptance, guesses, sequences, point, total, best.devices)


def _meets(search: Search, one: Speculation) -> bool:
    wanted = search.question.objectives
    return one.point.ttft <= (wanted.ttft or one.point.ttft) and one.point.tpot <= (wanted.tpot or one.point.tpot)
