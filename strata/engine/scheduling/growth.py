"""Pages for sequences that run, and whose are taken for them when there are no more."""

from __future__ import annotations

from collections.abc import Callable

from strata.cache.pages import PageAllocator
from strata.engine.request import Sequence
from strata.engine.scheduling.builder import PlanBuilder
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.queues import Queues
from strata.engine.scheduling.windows import Windows


class Growth:
    """Gives running sequences pages of all kinds: first those that only the prefix tree holds, then those of the last
    that runs, which is preempted."""

    def __init__(
        self,
        pages: PageAllocator,
        prefixes: Prefixes,
        queues: Queues,
        windows: Windows | None,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._pages, self._prefixes, self._queues, self._windows = pages, prefixes, queues, windows
        self._preempt = preempt

    def grow(self, sequence: Sequence, end: int, builder: PlanBuilder) -> bool:
        """Give a sequence pages of its own to write its tokens up to `end` in; False if it does not run now for want of
        some: it is preempted, or waits to know how many it has, of drafts that are under way."""
        pages, size = sequence.pages, self._pages.page_size
        windows = self._windows
        if windows is not None:
            windows.trim(sequence)
        while not self._has_room(self.wanted(sequence, end)):
            if sequence.drafted:
                return False
            victim = self._queues.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if self._ends_shared(sequence):
            page = self._pages.allocate(after=pages[-1])
            builder.copies.append((pages[-1], page))
            if windows is not None:
                builder.window_copies += windows.copy_last(sequence)
            self._pages.release(pages[-1])
            pages[-1] = page
            sequence.sent_pages = min(sequence.sent_pages, len(pages) - 1)
        while len(pages) * size < end:
            pages.append(self._pages.allocate(after=pages[-1]))
        if windows is not None:
            windows.extend(sequence, end)
        return True

    def wanted(self, sequence: Sequence, end: int) -> int:
        """Pages that a sequence lacks to write its tokens up to `end` in; fewer once another has ended that shares."""
        return max(0, self._pages.pages_for(end) - len(sequence.pages)) + self._ends_shared(sequence)

    def spares(self, sequence: Sequence, end: int) -> bool:
        """Whether there are these pages, and one more for each that runs."""
        wanted = self.wanted(sequence, end)
        if not wanted:
            return True
        windows = () if self._windows is None else self._windows.room
        return min((self._pages.free + self._pages.idle, *windows)) >= wanted + len(self._queues.running)

    def _ends_shared(self, sequence: Sequence) -> bool:
        """Whether a sequence is to write next in a page that others hold."""
        pages = sequence.pages
        return sequence.computed < len(pages) * self._pages.page_size and self._pages.is_shared(pages[-1])

    def _has_room(self, pages: int) -> bool:
        """Whether so many pages of all kinds are free, if need be some that only the tree has kept."""
        lacking = pages - self._pages.free
        if lacking > 0 and self._prefixes.evict(lacking) < lacking:
            return False
        return self._windows is None or self._windows.have_room(pages)

    def fitting(self, sequence: Sequence, count: int, builder: PlanBuilder, prefilling: list[Sequence]) -> int:
        """How many of the next `count` tokens of a prompt its windows have pages for. If there are none and nothing
        else runs, the last sequence is preempted, so that the first one always gets on."""
        assert self._windows is not None
        while True:
            fitting = self._windows.fitting(sequence, sequence.computed, count)
            victim = self._queues.running[-1]
            if fitting or not count or builder.decodes or builder.others or victim is sequence:
                return fitting
            self._preempt(victim)
            if victim in prefilling:  # behind `sequence`
                prefilling.remove(victim)
