"""Steps in a row in which all that run decode and nothing else happens: taken at once, where no device runs them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed

from strata.cache.pages import PageAllocator, SharedKeys
from strata.engine.plan import StepPlan
from strata.engine.request import Sequence
from strata.engine.scheduling.admission import Admission
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.queues import Queues


class DecodeRuns:
    """What many rounds of `Scheduler.schedule` and `Scheduler.complete` come to while every one of them decodes for the
    same sequences, none of which ends, comes or goes.

    Nobody is told of the plans, so this is for simulations: what it leaves is what the rounds would have left, pages
    and their order included.
    """

    def __init__(
        self, pages: PageAllocator, prefixes: Prefixes, queues: Queues, admission: Admission, draws: int
    ) -> None:
        """draws: the most ids that a step brings a sequence; there are no runs if that is more than one."""
        self._pages, self._prefixes, self._queues, self._admission = pages, prefixes, queues, admission
        self._draws = draws

    @property
    def sequences(self) -> Listed[Sequence]:
        """Those that run, in order."""
        return self._queues.running

    @property
    def shared(self) -> SharedKeys:
        """What they share, which stays as it is: they grow by pages of their own."""
        return self._pages.shared

    def longest(self, plan: StepPlan) -> int:
        """How many rounds can be taken at once behind `plan`, the only one that is not completed; 0 if none can."""
        running, size = self._queues.running, self._pages.page_size
        if not running or plan.tokens != len(plan.chunks) or len(plan.chunks) != len(running) or self._draws > 1:
            return 0
        # Pages of windows come and go as sequences grow, and plans say when snapshots are taken.
        if self._prefixes.windows or self._prefixes.states.there_are:
            return 0
        if self._queues.waiting and self._queues.free_slots and not self._admission.stays_refused:
            return 0
        rounds = min([sequence.max_length - len(sequence.tokens) for sequence in running]) - 1
        for sequence in running:
            computed = sequence.computed
            decodes = sequence.pending == 1 and computed == len(sequence.tokens) >= sequence.prompt_length
            if not decodes or not sequence.verified or sequence.long_bad_words:
                return 0
            if computed % size and self._pages.is_shared(sequence.pages[-1]):
                return 0
        room = self._pages.free + self._pages.idle
        while rounds > 0 and self._wanted(rounds) > room:
            rounds //= 2
        return max(0, rounds)

    def take(self, rounds: int, drawn: Callable[[Sequence, int], Listed[int]]) -> None:
        """Take so many rounds, at most `longest` of them. drawn: the next ids of a sequence, so many; none of them ends
        it."""
        size = self._pages.page_size
        growing: list[tuple[int, int]] = []  # round and place of each that needs a page in it
        for place, sequence in enumerate(self._queues.running):
            first = len(sequence.pages) * size - sequence.computed
            if first < rounds:
                growing += ((each, place) for each in range(first, rounds, size))
            sequence.tokens += drawn(sequence, rounds)
            sequence.computed += rounds
        self._queues.ended = []
        growing.sort()
        for _, place in growing:
            pages = self._queues.running[place].pages
            if not self._pages.free:
                self._prefixes.evict(1)
            pages.append(self._pages.allocate(after=pages[-1]))
            self._queues.running[place].sent_pages = len(pages)

    def _wanted(self, rounds: int) -> int:
        """Pages that so many rounds need."""
        pages_for = self._pages.pages_for
        return sum([pages_for(one.computed + rounds) - len(one.pages) for one in self._queues.running])
