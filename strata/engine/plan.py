"""What a step is to do: the messages by which a scheduler drives whatever runs its steps.

They hold ids and numbers alone, so msgspec encodes them, and the same stream of them drives a device, several ranks, a
simulation, or the replay of a run that was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from strata.cache.pages import NONE_SHARED, SharedKeys


class Sampling(NamedTuple):
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


class NewSequence(NamedTuple):
    """A sequence takes a slot: all that a runner has to know of it. One that was preempted comes as a new one.

    tokens: all its ids so far, of which the first `prompt_length` are the prompt. The ids after them are drawn in the
        slot, and a runner keeps them by itself.
    seed: int64, of the noise that its ids are drawn with.
    constrained: its draws wait for the masks of a grammar.
    prompt_logprobs: how many of the likeliest ids to report for each prompt token; None reports nothing.
    """

    id: int
    slot: int
    tokens: tuple[int, ...]
    prompt_length: int
    seed: int
    sampling: Sampling = Sampling()
    constrained: bool = False
    prompt_logprobs: int | None = None


class Draw(NamedTuple):
    """The id of a sequence that samples a token, and its slot."""

    sequence: int
    slot: int


class Chunk(NamedTuple):  # a tuple is made three times as fast as a frozen dataclass, and a step makes hundreds
    """One sequence's share of a step.

    sequence: its id.
    start: tokens whose keys and values are in pages before the step.
    count: tokens to run now. Beyond the tokens that its `NewSequence` told it is one, the id that `slot` drew last.
    draws: who samples from the chunk's last row: nobody while a prompt is unfinished, its sequence in decode, all
        samples of the request at the end of its prompt.
    first_page, new_pages: entries of the slot's block table, from `first_page` on, that have not been sent yet; all
        entries at the first chunk in a slot.
    """

    sequence: int
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides the method of tuple, which nobody calls
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
    chunks: first those of one token and one draw (decodes), then the others, each part in the scheduler's order.
    copies: (from, to) pages, to be copied in this order before the step writes anything.
    tokens: the sum of the chunks' counts.
    banned: (slot, id) that this draw of the slot may not give, because it would complete a bad word.
    windows, window_copies: what `new_pages` of chunks and `copies` are for pages of all tokens, for those of layers
        with windows; copies are (group, from, to).
    states_before, states_after: (from, to) rows of fixed states, to be copied in this order before the step reads any,
        and once it has written all. A slot is a row; those behind `FixedStates`' padding are snapshots.
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


NOTHING = StepPlan((), (), (), (), 0)


class PlanArrays:
    """A plan's tokens, and its chunks as arrays: slot, first token and tokens of each, tokens of its sequence and rows
    of the step up to its last; and of each draw the slot, the tokens before it, and the row of the step that it
    samples."""

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


@dataclass(frozen=True)
class UndrawnStep:
    """A step whose ids are drawn once the masks of its grammars are known; runners add what they need to go on."""

    plan: StepPlan
