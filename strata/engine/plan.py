"""What a step is to do, and what it did: the values that scheduler and runner exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from strata.engine.request import Sequence


class Draw(NamedTuple):
    """A sequence that samples a token, and its row of device state."""

    sequence: Sequence
    slot: int


class Chunk(NamedTuple):  # a tuple is made three times as fast as a frozen dataclass, and a step makes hundreds
    """One sequence's share of a step.

    start: tokens whose keys and values are in pages before the step.
    count: tokens to run now. Where `start + count` exceeds the tokens that the host knows, the last one is on the
        device, as the id that `slot` sampled last.
    draws: who samples from the chunk's last row: nobody while a prompt is unfinished, its sequence in decode, all
        samples of the request at the end of its prompt.
    first_page, new_pages: entries of the slot's page table, from `first_page` on, that the slot's chunks have not told
        yet; all entries at the first chunk in a slot.
    """

    sequence: Sequence
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides the method of tuple, which nobody calls
    draws: tuple[Draw, ...]
    first_page: int
    new_pages: tuple[int, ...]


class Update(NamedTuple):
    """A token that a sequence got, None if its request has failed, and why it ended there (None: it goes on)."""

    sequence: Sequence
    token: int | None
    finish_reason: str | None


@dataclass(frozen=True)
class StepPlan:
    """One step of the device.

    chunks: first those of one token and one draw (decodes), then the others, each part in order of rank.
    copies: (from, to) pages, to be copied in this order before the step writes anything.
    tokens: the sum of the chunks' counts.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    tokens: int

    @property
    def draws(self) -> list[Draw]:
        """All draws, in the order in which `Scheduler.complete` takes their ids."""
        return [draw for chunk in self.chunks for draw in chunk.draws]


@dataclass
class Draft:
    """A plan in the making. left: tokens that it may still get."""

    left: int
    decodes: list[Chunk] = field(default_factory=list)
    others: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def plan(self) -> StepPlan | None:
        """None if nothing is to run."""
        chunks = (*self.decodes, *self.others)
        tokens = len(self.decodes) + sum(chunk.count for chunk in self.others)
        return StepPlan(chunks, tuple(self.copies), tokens) if chunks else None
