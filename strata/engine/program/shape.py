"""What is known of a step before it runs, from which all that runs it follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.cache.tables import BufferShape
from strata.engine.plan import PlanArrays, StepPlan
from strata.engine.ranks.prefill_context_parallel import RankStep
from strata.kernels.attention.query_chunks import keys_in_blocks, pure_prefill_rows


class StepShape(NamedTuple):
    """The shape of a step.

    tokens, sequences, draws: as many as it has; where ranks have sequences of their own, as the fullest has. prompts:
    sequences from the first on that has more than one token. decodes: every sequence has one token and is sampled.
    scored: log-probabilities of some prompt's tokens are asked for. tagged: some sequence brings tags along, of which
    its batch has the rows, so that it replays no CUDA graph. pure_prefill_rows: rows that it needs if all its sequences
    begin in it, see `query_chunks`; None: some do not. behind: the most tokens that a prompt has from before it.
    prompt_keys: that its prompts see, each in whole blocks.
    step: chunk for chunk, of this rank; None: of any step that `size` holds. size: the captured one that it replays;
    None: it is launched. share: what this rank runs of it where ranks divide its tokens.
    """

    tokens: int
    sequences: int
    draws: int
    prompts: int = 0
    decodes: bool = False
    scored: bool = False
    pure_prefill_rows: int | None = None
    behind: int = 0
    prompt_keys: int = 0
    step: PlanArrays | None = None
    size: BufferShape | None = None
    share: RankStep | None = None
    tagged: bool = False

    @staticmethod
    def of(step: PlanArrays, *, scored: bool = False, tagged: bool = False) -> StepShape:
        rows = None if step.starts.any() else pure_prefill_rows(step.counts.tolist())
        size = step.tokens, len(step.counts), len(step.drawn), step.prompts
        keys = keys_in_blocks(step.prompt_ends)
        return StepShape(*size, step.are_decodes, scored, rows, step.behind, keys, step, tagged=tagged)

    @staticmethod
    def of_ranks(plans: Sequence[StepPlan], *, scored: bool, tagged: bool) -> StepShape:
        """Of ranks with sequences of their own, whose rows travel together, so that their steps are alike: of each the
        most that any plan has, and what its own leaves of that is padding. At least one has a chunk."""
        arrays = [PlanArrays(plan) for plan in plans]
        decodes = all(one.are_decodes for one in arrays)
        rows = None
        if not decodes and not any(one.starts.any() for one in arrays):
            rows = max(pure_prefill_rows(one.counts.tolist()) for one in arrays if len(one.counts))
        return StepShape(
            tokens=max(plan.tokens for plan in plans),
            sequences=max(len(plan.chunks) for plan in plans),
            draws=max(len(one.drawn) for one in arrays),
            prompts=max(one.prompts for one in arrays),
            decodes=decodes,
            scored=scored,
            pure_prefill_rows=rows,
            behind=max(one.behind for one in arrays),
            prompt_keys=max(keys_in_blocks(one.prompt_ends) for one in arrays),
            tagged=tagged,
        )

    def buffer(self, plan: StepPlan) -> BufferShape:
        """Of a rank's step of such a shape that replays no CUDA graph. Padding tokens are of one sequence, or each of
        its own where all decode."""
        if self.decodes:
            return BufferShape(self.tokens, self.tokens, self.draws)
        return BufferShape(self.tokens, len(plan.chunks) + (plan.tokens < self.tokens), self.draws)

    def longest(self, plan: StepPlan) -> int:
        """Tokens of the longest sequence in `buffer`, padding too."""
        counts = [chunk.count for chunk in plan.chunks]
        return 1 if self.decodes else max(*counts, self.tokens - plan.tokens, 1)

    @staticmethod
    def replayed(size: BufferShape) -> StepShape:
        """Of every step that replays that size."""
        decodes = size.tokens == size.sequences
        return StepShape(size.tokens, size.sequences, size.draws, size.prompts or 0, decodes, size=size)

    @property
    def rows(self) -> int:
        """Tokens that its graph runs on each rank, with padding."""
        if self.size is not None:
            return self.size.tokens
        return self.tokens if self.share is None else self.share.rows

    @property
    def replays_decodes(self) -> bool:
        return self.decodes and self.size is not None
