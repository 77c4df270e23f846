"""A plan in the making: what a step runs so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.engine.plan import Chunk, NewSequence, StepPlan


@dataclass
class PlanBuilder:
    """A plan in the making. budget: tokens that it may still get."""

    budget: int
    new: list[NewSequence] = field(default_factory=list)
    decodes: list[Chunk] = field(default_factory=list)
    others: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    banned: list[tuple[int, int]] = field(default_factory=list)

    def plan(self, ended: list[int]) -> StepPlan | None:
        """None if nothing is to run."""
        chunks = (*self.decodes, *self.others)
        if not chunks:
            return None
        tokens = len(self.decodes) + sum(chunk.count for chunk in self.others)
        return StepPlan(tuple(ended), tuple(self.new), chunks, tuple(self.copies), tokens, tuple(self.banned))
