"""Who waits, who runs, and in which slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from operator import attrgetter

from strata.engine.request import NO_SLOT, Sequence, Status


class Queues:
    """Sequences that wait and that run, each list in order; and the slots, one for each that runs.

    ended: slots that were taken back, of which no plan has told yet.
    """

    def __init__(self, slots: int) -> None:
        self._num_slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget all sequences; what a slot held is told to nobody."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended: list[int] = []
        self._slots = list(range(self._num_slots))  # a heap of those that are free

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to be computed before those that wait, and those that run in chunks, draw."""
        running = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed > 1]
        in_line = sum([len(sequence.tokens) for sequence in self.waiting])
        return in_line + sum([len(sequence.tokens) - sequence.computed for sequence in running])

    def has_space(self, max_tokens: int) -> bool:
        """Whether one more sequence would have a slot and tokens in the next step, which has so many at most."""
        if self.free_slots <= len(self.waiting):
            return False
        in_line = sum([len(sequence.tokens) for sequence in self.waiting])
        in_line += sum([max(1, len(sequence.tokens) - sequence.computed) for sequence in self.running])
        return in_line < max_tokens

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence that is in no queue wait."""
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=order)

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence wait no more; a sample that has yet to fork waits in no queue."""
        _remove(self.waiting, sequence)

    def start(self, sequence: Sequence) -> int:
        """Let a sequence that is in no queue run, in a free slot, which is returned."""
        slot = sequence.slot = heappop(self._slots)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=order)
        return slot

    def stop(self, sequence: Sequence) -> None:
        """Take its slot from a sequence that runs."""
        _remove(self.running, sequence)
        heappush(self._slots, sequence.slot)
        self.ended.append(sequence.slot)
        sequence.slot = NO_SLOT

    def check(self) -> None:
        """Raise AssertionError unless slots, states and orders agree."""
        slots = [sequence.slot for sequence in self.running]
        assert sorted([*self._slots, *slots]) == list(range(self._num_slots)), "a slot is lost or held twice"
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            assert all(sequence.status is status for sequence in queue), f"a sequence that is not {status.name}"
            assert queue == sorted(queue, key=order), "a queue is out of order"
        assert all(not sequence.pages and sequence.slot == NO_SLOT for sequence in self.waiting), (
            "a page held in the queue"
        )


order = attrgetter("order")


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a queue, if it is in it."""
    place = bisect_left(queue, sequence.order, key=order)
    if place < len(queue) and queue[place] is sequence:
        del queue[place]
