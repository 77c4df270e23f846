"""How large the steps of ranks are that have sequences of their own: their rows travel together, so all are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.cache.tables import BufferShape
from strata.engine.plan import PlanArrays, StepPlan
from strata.kernels.attention.virtual_sequences import fresh_rows, keys_in_blocks


class StepRoom(NamedTuple):
    """What each rank's step has room for; what its own plan leaves of that is padding.

    tokens, sequences, draws, prompts: of each the most that any plan has. decodes: all plans decode alone. scored: some
    plan has a prompt of which log-probabilities are reported. fresh: most rows that a plan needs, see `fresh_rows`, if
    all sequences of all plans begin in them. behind: the most tokens that a prompt has from before the step.
    prompt_keys: that the prompts of a plan see, each in
    whole blocks, the most of any plan. tagged: some plan has a sequence with tags.
    """

    tokens: int
    sequences: int
    draws: int
    prompts: int
    decodes: bool
    scored: bool
    fresh: int | None
    behind: int
    prompt_keys: int
    tagged: bool = False

    @staticmethod
    def of(plans: Sequence[StepPlan], scored: bool, tagged: bool = False) -> StepRoom:
        """Of the plans of all ranks for one step; at least one of them has a chunk."""
        arrays = [PlanArrays(plan) for plan in plans]
        decodes = all(one.are_decodes for one in arrays)
        fresh = None
        if not decodes and not any(one.starts.any() for one in arrays):
            fresh = max(fresh_rows(one.counts.tolist()) for one in arrays if len(one.counts))
        return StepRoom(
            tokens=max(plan.tokens for plan in plans),
            sequences=max(len(plan.chunks) for plan in plans),
            draws=max(len(one.drawn) for one in arrays),
            prompts=max(one.prompts for one in arrays),
            decodes=decodes,
            scored=scored,
            fresh=fresh,
            behind=max(one.behind for one in arrays),
            prompt_keys=max(keys_in_blocks(one.prompt_ends) for one in arrays),
            tagged=tagged,
        )

    def shape(self, plan: StepPlan) -> BufferShape:
        """The buffer of a rank's step that replays no recording. Padding tokens are of one sequence, or each of its own
        where all decode."""
        if self.decodes:
            return BufferShape(self.tokens, self.tokens, self.draws)
        return BufferShape(self.tokens, len(plan.chunks) + (plan.tokens < self.tokens), self.draws)

    def longest(self, plan: StepPlan) -> int:
        """Tokens of the longest sequence in `shape`, padding too."""
        counts = [chunk.count for chunk in plan.chunks]
        return 1 if self.decodes else max(*counts, self.tokens - plan.tokens, 1)
