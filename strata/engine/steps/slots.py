"""What the host keeps of the sequences that run, by their slots."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import numpy as np
from numpy.typing import NDArray

from strata.engine.plan import NewSequence, PlanArrays, StepPlan
from strata.engine.sampler import filters, is_special


class SlotState:
    """What the host keeps of each slot: the sequence that has it, as the scheduler told, and how that one samples."""

    def __init__(self, slots: int) -> None:
        self.sequences: list[NewSequence | None] = [None] * slots
        self.known = np.zeros(slots, np.int32)  # ids that the host has
        self.newest = np.zeros(slots, np.int32)  # what has been drawn last, if the host is told
        self.prompt_lengths = np.zeros(slots, np.int32)
        self.temperatures: NDArray[np.float32] = np.zeros(slots, np.float32)
        self.seeds: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.top_k: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.top_p: NDArray[np.float32] = np.ones(slots, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(slots, np.float32)
        # Of the sequence's adapter and of its weights' version, by which operations find what is theirs.
        self.tags: NDArray[np.int32] = np.zeros((slots, 2), np.int32)
        # Slots that do not draw greedily from the logits as they are; `scored`: whose prompts are; `tagged`: with tags.
        self.sampled: set[int] = set()
        self.filtered: set[int] = set()
        self.special: set[int] = set()
        self.constrained: set[int] = set()
        self.scored: set[int] = set()
        self.tagged: set[int] = set()

    def __getitem__(self, slot: int) -> NewSequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} has no sequence"
        return sequence

    def learn(self, plan: StepPlan) -> None:
        """Take what a plan tells of sequences that have ended, and of new ones."""
        for slot in plan.ended:
            self.end(slot)
        for sequence in plan.new:
            self._start(sequence)

    def scores(self, plan: StepPlan) -> bool:
        """Whether the step has rows of a prompt whose log-probabilities are reported."""
        scored, lengths = self.scored, self.prompt_lengths
        return bool(scored) and any(
            chunk.slot in scored and chunk.start < lengths[chunk.slot] - 1 for chunk in plan.chunks
        )

    def waits(self, plan: StepPlan) -> bool:
        """Whether the step is drawn once it has masks."""
        return bool(self.constrained) and any(draw.slot in self.constrained for draw in plan.draws)

    def tags_any(self, plan: StepPlan) -> bool:
        """Whether the step runs a sequence with tags."""
        return bool(self.tagged) and any(chunk.slot in self.tagged for chunk in plan.chunks)

    def _start(self, sequence: NewSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self.sequences[slot] = sequence
        self.known[slot], self.prompt_lengths[slot] = len(sequence.tokens), sequence.prompt_length
        self.temperatures[slot], self.seeds[slot] = sampling.temperature, sequence.seed
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = sampling.top_k, sampling.top_p, sampling.min_p
        for slots, has_it in (
            (self.sampled, sampling.temperature > 0),
            (self.filtered, sampling.temperature > 0 and filters(sampling)),
            (self.special, is_special(sampling)),
            (self.constrained, sequence.constrained),
            (self.scored, sequence.prompt_logprobs is not None),
            (self.tagged, any(sequence.adapter_and_weights)),
        ):
            (slots.add if has_it else slots.discard)(slot)
        for column, name in enumerate(sequence.adapter_and_weights):
            self.tags[slot, column] = self._tag_row(slot, column, name) if name else 0

    def _tag_row(self, slot: int, column: int, name: str) -> int:
        """Each tag has the lowest row, from 1 on, that no other tag of a running sequence has: the same on all ranks,
        which are told the same plans."""
        others = self.tagged - {slot}
        rows = {self[other].adapter_and_weights[column]: int(self.tags[other, column]) for other in others}
        return rows[name] if name in rows else next(row for row in count(1) if row not in rows.values())

    def place_tags(self, host: Mapping[str, NDArray[np.int32]], slots: NDArray[np.int32]) -> None:
        """Write the rows of a step's sequences, whose slots these are; padding has none."""
        rows = host["tags"].reshape(-1, 2)
        rows[: len(slots)], rows[len(slots) :] = self.tags[slots], 0

    def place_draws(self, host: Mapping[str, NDArray[np.int32]], arrays: PlanArrays) -> None:
        """Write which rows of a step are sampled, and how, into the fields of its buffer."""
        slots, drawn = arrays.draw_slots, len(arrays.drawn)
        host["rows"][:drawn] = arrays.draw_rows
        host["draw_slots"][:drawn] = slots
        for name in ("temperatures", "top_k", "top_p", "min_p"):
            host[name][:drawn] = getattr(self, name)[slots].view(np.int32)
        host["seeds"][: 2 * drawn] = self.seeds[slots].view(np.int32)
        host["steps"][:drawn] = arrays.draw_lengths - self.prompt_lengths[slots]

    def end(self, slot: int) -> None:
        self.sequences[slot] = None
        for slots in (self.sampled, self.filtered, self.special, self.constrained, self.scored, self.tagged):
            slots.discard(slot)


def meets(some: set[int], slots: list[int]) -> bool:
    """Whether any of `slots` is among some, which mostly are none."""
    return bool(some) and not some.isdisjoint(slots)
