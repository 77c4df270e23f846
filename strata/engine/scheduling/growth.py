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

    def grow(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give a sequence a page of its own to write its next token in; False if it was preempted for want of one."""
        pages = sequence.pages
        full = sequence.computed == len(pages) * self._pages.page_size
        windows = self._windows
        if windows is not None:
            windows.trim(sequence)
        while not (self._pages.free or self._prefixes.evict(1)) or not (windows is None or windows.have_room()):
            victim = self._queues.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
            if not full and not self._pages.is_shared(pages[-1]):
                return True  # the victim was the other holder
        page = self._pages.allocate(after=pages[-1])
        if full:
            pages.append(page)
            if windows is not None:
                windows.extend(sequence, sequence.computed + 1)
            return True
        builder.copies.append((pages[-1], page))
        if windows is not None:
            builder.window_copies += windows.copy_last(sequence)
        self._pages.release(pages[-1])
        pages[-1] = page
        sequence.sent_pages = min(sequence.sent_pages, len(pages) - 1)
        return True

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
