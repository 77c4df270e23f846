"""What a step is to do: the messages by which a scheduler drives whatever runs its steps.

They hold ids and numbers alone, so msgspec encodes them, and the same stream of them drives a device, several ranks, a
simulation, or the replay of a run that was recorded. Structs of msgspec are made three times as fast as tuples with
names, and a step makes hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from strata.cache.pages import NONE_SHARED, SharedKeys


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How ids are chosen; the names of `SamplingParams` mean what they mean there.

    end_ids: may not be drawn as one of the first `min_tokens`.
    banned_ids: may never be drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    logprobs: int | None = None


class Tags(NamedTuple):
    """What a sequence brings along that its keys and values depend on, each by a digest or a version; empty: none.

    adapter: whose weights are added. draft: who drafts for it and keeps keys of its own. weights: of which version.
    """

    adapter: str = ""
    draft: str = ""
    weights: str = ""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot: all that a runner has to know of it. One that was preempted comes as a new one.

    tokens: all its ids so far, of which the first `prompt_length` are the prompt; negative ones stand for content, see
        `strata.engine.args.segments`. The ids after them are drawn in the slot, and a runner keeps them by itself.
    seed: int64, of the noise that its ids are drawn with.
    constrained: its draws wait for the masks of a grammar.
    prompt_logprobs: how many of the likeliest ids to report for each prompt token; None reports nothing.
    tags: what it brings along.
    """

    id: int
    slot: int
    tokens: tuple[int, ...]
    prompt_length: int
    seed: int
    sampling: Sampling = Sampling()
    constrained: bool = False
    prompt_logprobs: int | None = None
    tags: Tags | None = None

    @property
    def adapter_and_weights(self) -> tuple[str, str]:
        """The tags of which a step has rows, see `Batch.tags`."""
        return ("", "") if self.tags is None else (self.tags.adapter, self.tags.weights)


# What is told for a drawn row behind which a draft was wrong: nothing comes of it.
REJECTED = -2


class Draw(NamedTuple):
    """The id of a sequence that samples a row, and its slot.

    A sequence draws several times in a step where ids are drafted behind its newest: each draw that equals the draft
    in the next row is accepted together with the next draw, so that a step brings it one id or more. For all draws
    behind the last that is accepted the runner tells `REJECTED`, and for one whose logits held NaN -1.
    """

    sequence: int
    slot: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step.

    sequence: its id.
    start: tokens whose keys and values are in pages before the step, if all draws under way are accepted. The runner
        knows how many were, and begins so much earlier.
    count: tokens to run now. Those beyond what its `NewSequence` told are ids that `slot` drew, most often one, and
        behind the newest of them the drafts of all rows but the first that its sequence draws.
    draws: who samples: nobody while a prompt is unfinished, its sequence in decode, all samples of the request at the
        end of its prompt. They read the chunk's last row; of several draws of its own sequence each reads a row, and
        the last one the last.
    first_page, new_pages: entries of the slot's block table, from `first_page` on, that have not been sent yet; all
        entries at the first chunk in a slot.
    """

    sequence: int
    slot: int
    start: int
    count: int
    draws: tuple[Draw, ...]
    first_page: int
    new_pages: tuple[int, ...]


class WindowEntries(NamedTuple):
    """Entries of a slot's block table in a window's group, from `first_page` on, that have not been sent yet.

    group: its number among the groups of layers that have windows.
    """

    group: int
    slot: int
    first_page: int
    new_pages: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step of the device.

    ended: slots whose sequences have ended or were preempted since the plan before.
    new: sequences that take a slot, maybe one that has just ended. After an interruption no plan says that slots have
        ended: who takes a slot takes it from whoever had it.
    chunks: first those of one token and one draw (decodes), then those with drafts, then prompts, each part in the
        scheduler's order. With none nothing can run before a transfer has ended: the step ends when one has, and in any
        case shortly.
    copies: (from, to) pages, to be copied in this order before the step writes anything. If `from` is no page of the
        pool, it is a place elsewhere (see `strata.cache.prefix`): such a transfer may take longer than the step,
        which does not read the page, and its end is told by an `TransferEnd`.
    tokens: the sum of the chunks' counts.
    banned: (slot, id) that this draw of the slot may not give, because it would complete a bad word.
    windows, window_copies: what `new_pages` of chunks and `copies` are for pages of all tokens, for those of layers
        with windows; copies are (group, from, to).
    states_before, states_after: (from, to) rows of fixed states, to be copied in this order before the step reads any,
        and once it has written all. A slot is a row; those behind `RecurrentStates`' padding are snapshots.
    shared: keys that several sequences read from the same pages, of all sequences that have a slot; none is told where
        a model has stages. No step needs it, but what it takes depends on it.
    """

    ended: tuple[int, ...]
    new: tuple[NewSequence, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    tokens: int
    banned: tuple[tuple[int, int], ...] = ()
    windows: tuple[WindowEntries, ...] = ()
    window_copies: tuple[tuple[int, int, int], ...] = ()
    states_before: tuple[tuple[int, int], ...] = ()
    states_after: tuple[tuple[int, int], ...] = ()
    shared: SharedKeys = NONE_SHARED

    @property
    def draws(self) -> list[Draw]:
        """All draws, in the order in which `Scheduler.complete` takes their ids."""
        return [draw for chunk in self.chunks for draw in chunk.draws]


class RankPlans(StepPlan, frozen=True, array_like=True):
    """One step of ranks that have sequences of their own: beside the plan of each rank, in their order, what they have
    together. A rank with nothing to do has a plan without chunks. Slots and pages are those of the rank."""

    parts: tuple[StepPlan, ...] = ()

    @staticmethod
    def of(parts: tuple[StepPlan, ...]) -> RankPlans:
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        return RankPlans((), (), chunks, (), sum(part.tokens for part in parts), parts=parts)


class TransferEnd(NamedTuple):
    """A transfer to a page of the pool has ended. whole: the page holds what was to come; else nothing of use."""

    page: int
    whole: bool = True


NOTHING = StepPlan((), (), (), (), 0)


class PlanArrays:
    """A plan's tokens, and its chunks as arrays: slot, first token and tokens of each, tokens of its sequence and rows
    of the step up to its last; and of each draw the slot, the tokens before it, and the row of the step that it
    samples. Of a sequence with draws under way all tokens count as accepted, see `Chunk`."""

    def __init__(self, plan: StepPlan) -> None:
        chunks = plan.chunks
        self.tokens = plan.tokens
        slots = [chunk.slot for chunk in chunks]
        draws = [len(chunk.draws) for chunk in chunks]
        self.slots = np.array(slots, dtype=np.int32)
        self.starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        self.are_decodes = plan.tokens == len(chunks) == draws.count(1)
        if self.are_decodes:
            self.counts = np.ones(len(chunks), dtype=np.int32)
            self.ends = self.starts + self.counts
            self.last_rows = np.arange(len(chunks), dtype=np.int32)
            self.drawn, self.draw_slots = slots, self.slots
            self.draw_lengths, self.draw_rows = self.ends, self.last_rows
        else:
            self.counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
            self.ends = self.starts + self.counts
            self.last_rows = np.cumsum(self.counts, dtype=np.int32) - 1
            self.drawn = [draw.slot for draw in plan.draws]
            self.draw_slots = np.array(self.drawn, dtype=np.int32)
            self.draw_lengths = np.repeat(self.ends, draws)
            self.draw_rows = np.repeat(self.last_rows, draws)
            if max(draws, default=0) > 1:
                self._spread(plan)

    def _spread(self, plan: StepPlan) -> None:
        """Of several draws of a sequence in its own chunk each samples a row, and the last one the last."""
        first = 0
        for chunk in plan.chunks:
            end = first + len(chunk.draws)
            if end - first > 1 and chunk.draws[1].sequence == chunk.sequence:
                back = np.arange(first - end + 1, 1, dtype=np.int32)
                self.draw_lengths[first:end] += back
                self.draw_rows[first:end] += back
            first = end

    @property
    def prompts(self) -> int:
        """The chunks from the first on that has more than one token: those before it decode."""
        more = np.flatnonzero(self.counts != 1)
        return len(self.counts) - int(more[0]) if len(more) else 0

    @property
    def behind(self) -> int:
        """The most tokens that one of the prompts has from before the step; 0 if there is none."""
        prompts = self.prompts
        return int(self.starts[-prompts:].max()) if prompts else 0

    @property
    def prompt_ends(self) -> list[int]:
        """Tokens of each prompt up to the step's end."""
        found: list[int] = self.ends[len(self.ends) - self.prompts :].tolist()
        return found


@dataclass(frozen=True)
class UndrawnStep:
    """A step whose ids are drawn once the masks of its grammars are known; runners add what they need to go on."""

    plan: StepPlan
