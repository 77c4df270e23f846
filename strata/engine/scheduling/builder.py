"""A plan in the making: what a step runs so far, and what it still has room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from strata.cache.pages import SharedKeys
from strata.engine.plan import Chunk, NewSequence, StepPlan, WindowEntries
from strata.engine.scheduling.prompt_budget import InLine, PromptBudget, StepTarget


@dataclass
class PlanBuilder:
    """A plan in the making.

    budget: tokens that it may still get, none once a prompt had to be divided. page_size: of KV pages. prompt_budget:
    what decodes leave for prompts; None if that is the budget.
    """

    budget: int
    page_size: int
    prompt_budget: PromptBudget | None = None
    new: list[NewSequence] = field(default_factory=list)
    decodes: list[Chunk] = field(default_factory=list)
    others: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    banned: list[tuple[int, int]] = field(default_factory=list)
    windows: list[WindowEntries] = field(default_factory=list)
    window_copies: list[tuple[int, int, int]] = field(default_factory=list)
    states_before: list[tuple[int, int]] = field(default_factory=list)
    states_after: list[tuple[int, int]] = field(default_factory=list)

    @property
    def runs_none(self) -> bool:
        """Whether nothing runs so far."""
        return not (self.decodes or self.others)

    def limit_prompts(self, target: StepTarget, in_line: Iterable[InLine]) -> None:
        """All decodes are planned, with drafts and without. in_line: see `PromptBudget`."""
        if not self.runs_none:
            rows = len(self.decodes) + sum([chunk.count for chunk in self.others])
            keys = sum([chunk.start for chunk in chain(self.decodes, self.others)]) + rows
            self.prompt_budget = PromptBudget(target, rows, keys, in_line)

    def chunk(self, start: int, wanted: int) -> int:
        """How many of the next `wanted` tokens of a prompt, behind the first `start`, the step has room for."""
        if self.prompt_budget is None:
            return min(wanted, self.budget)
        return self.prompt_budget.chunk(start, wanted, self.budget, self.page_size)

    def take(self, start: int, count: int, wanted: int) -> None:
        """A prompt takes that much room, of what it wanted."""
        self.budget = self.budget - count if count == wanted else 0
        if self.prompt_budget is not None:
            self.prompt_budget.take(start, count)

    def plan(self, ended: list[int], shared: SharedKeys) -> StepPlan:
        chunks = (*self.decodes, *self.others)
        tokens = len(self.decodes) + sum(chunk.count for chunk in self.others)
        told = tuple(ended), tuple(self.new), chunks, tuple(self.copies), tokens, tuple(self.banned)
        states = tuple(self.states_before), tuple(self.states_after)
        return StepPlan(*told, tuple(self.windows), tuple(self.window_copies), *states, shared)
