"""What running sequences draw next: a row for the newest id of each, and rows for drafts behind it."""

from __future__ import annotations

from strata.cache.pages import PageAllocator
from strata.engine.plan import Chunk
from strata.engine.request import Sequence
from strata.engine.scheduling.builder import PlanBuilder
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.growth import Growth
from strata.engine.scheduling.queues import Queues
from strata.engine.scheduling.states import States
from strata.engine.scheduling.windows import Windows


class Decodes:
    """Plans the rows that sequences draw from once their prompts are computed, in order.

    A step brings a sequence the ids of as many of its rows as are accepted, at least one. Until it is known how many,
    the next is planned as if all were: pages are taken for the most that there can be, and those that are left over
    serve later rows. Windows are given back for the least.
    """

    def __init__(
        self, pages: PageAllocator, queues: Queues, growth: Growth, windows: Windows | None, states: States
    ) -> None:
        self._pages, self._queues, self._growth = pages, queues, growth
        self._windows, self._states = windows, states

    def plan(self, builder: PlanBuilder, config: SchedulerConfig) -> list[Sequence]:
        """Plan rows for each running sequence that samples; returns those that still prefill."""
        prefilling = []
        running, size, is_shared = self._queues.running, self._pages.page_size, self._pages.is_shared
        stages, draws, every = config.stages, config.draws, self._states.every
        share = -(-len(running) // stages)
        spare = config.max_tokens - len(running)  # for drafts, when all who run get on
        rows, position = 1, 0
        while position < len(running):  # preemption shortens the list behind `position`
            sequence = running[position]
            position += 1
            start = sequence.computed
            total = len(sequence.tokens) + sequence.pending
            if start < total - 1 or start < sequence.prompt_length:
                prefilling.append(sequence)
                continue
            if total >= sequence.max_length:
                continue  # its last id is on the way
            if stages > 1 and (sequence.pending or len(builder.decodes) + len(builder.others) >= share):
                continue
            if draws > 1:
                if sequence.drafted and self._states.there_are:
                    continue  # from which state it goes on is not known
                rows = self._rows(sequence, min(draws, sequence.max_length - total, 1 + spare), builder)
                spare -= rows - 1
            end = start + rows
            pages = sequence.pages
            if (end > len(pages) * size or is_shared(pages[-1])) and not self._growth.grow(sequence, end, builder):
                continue
            sent = sequence.sent_pages
            unsent: tuple[int, ...] = ()
            if sent < len(pages):
                unsent = tuple(pages[sent:])
                sequence.sent_pages = len(pages)
                if self._windows is not None:
                    builder.windows += self._windows.unsent(sequence, sent)
            slot = sequence.slot
            assert slot is not None
            if rows == 1:
                builder.decodes.append(Chunk(sequence.id, slot, start, 1, sequence.draws, sent, unsent))
            else:
                builder.others.append(Chunk(sequence.id, slot, start, rows, sequence.draws * rows, sent, unsent))
                sequence.drafted += rows - 1
            if sequence.long_bad_words:
                builder.banned += ((slot, token) for token in sequence.completed_bad_words())
            sequence.computed = end
            sequence.pending += rows
            if every and not end % every:
                self._states.keep(sequence, builder)
        builder.budget -= len(builder.decodes) + sum([chunk.count for chunk in builder.others])
        return prefilling

    def _rows(self, sequence: Sequence, most: int, builder: PlanBuilder) -> int:
        """How many rows a sequence runs, at most so many: drafts take no page that another could want."""
        self._states.after_drafts(sequence, builder)
        if most == 1 or sequence.matcher is not None or sequence.long_bad_words:
            return 1
        if not self._growth.spares(sequence, sequence.computed + most):
            return 1
        return self._states.before_drafts(sequence, most, builder)
