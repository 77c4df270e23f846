"""Pages for sequences that run, and whose are taken for them when there are no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed

from strata.cache.pages import PageAllocator
from strata.cache.window_pages import WindowPages
from strata.engine.plan import Chunk, WindowEntries
from strata.engine.request import Sequence
from strata.engine.scheduling.builder import PlanBuilder
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.queues import Queues
from strata.engine.scheduling.states import States


class Windows:
    """The scheduler's side of window pages: a table of a sequence has as many entries as it has pages of all tokens
    that are computed or planned. What lies behind the window is given back before more is taken."""

    def __init__(self, groups: Listed[WindowPages]) -> None:
        self.groups = tuple(groups)

    @property
    def room(self) -> tuple[int, ...]:
        """Pages of each group that are free or that only the prefix tree keeps."""
        return tuple(group.books.free + group.books.idle for group in self.groups)

    def lack(self, pages: int, found: list[int], reserved: int) -> bool:
        """Whether a sequence that needs so many pages of all tokens behind those that were found, or of a window as
        many as it holds at once, must wait for others to end. reserved: pages that it has to leave to others."""
        return any(
            min(pages, group.wanted(found)) > room - reserved
            for group, room in zip(self.groups, self.room, strict=True)
        )

    def have_room(self, pages: int) -> bool:
        """Whether each group has so many free pages, if need be some that only the tree has kept."""
        return all(group.make_room(pages) for group in self.groups)

    def fitting(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of the next `count` tokens there are pages for, behind `start`; what lies behind their windows is
        given back."""
        tables = sequence.windows or (None,) * len(self.groups)
        wanted = fitting = self._taken(sequence, start + count) - start
        for group, table in zip(self.groups, tables, strict=True):
            if table is not None:
                group.trim(table, start)
            fitting = group.fitting(table, start, fitting)
        if fitting == wanted:
            return count
        return max(0, fitting - (self._taken(sequence, start + fitting) > start + fitting))

    def begin(self, sequence: Sequence, found: list[int]) -> None:
        """A sequence starts with pages that were found for it."""
        sequence.windows = tuple(group.begin(found) for group in self.groups)

    def fork(self, sequence: Sequence, sample: Sequence) -> None:
        """A sample starts with what its sequence has."""
        both = zip(self.groups, sequence.windows, strict=True)
        sample.windows = tuple(group.fork(table) for group, table in both)

    def trim(self, sequence: Sequence) -> None:
        """Give back what lies behind the windows of a sequence's next token, even if all drafts are rejected."""
        for group, table in zip(self.groups, sequence.windows, strict=True):
            group.trim(table, sequence.computed - sequence.drafted)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Take pages for so many tokens of a sequence in all; the room was asked for."""
        for group, table in zip(self.groups, sequence.windows, strict=True):
            group.extend(table, group.books.pages_for(tokens))

    def take(self, sequence: Sequence, start: int) -> Iterator[WindowEntries]:
        """Take pages for the tokens from `start` on that a step computes; the entries that tell of them."""
        self.extend(sequence, self._taken(sequence, sequence.computed))
        size = self.groups[0].books.page_size
        return self.unsent(sequence, start // size if sequence.sent_pages else 0)

    def copy_last(self, sequence: Sequence) -> Iterator[tuple[int, int, int]]:
        """Another last page in each group in place of one that others hold: (group, from, to), to be copied."""
        for number, (group, table) in enumerate(zip(self.groups, sequence.windows, strict=True)):
            yield number, *group.replace_last(table)

    def unsent(self, sequence: Sequence, sent: int) -> Iterator[WindowEntries]:
        """The entries of a sequence's tables from `sent` on, without those that were given back."""
        assert sequence.slot is not None
        for number, table in enumerate(sequence.windows):
            first = max(sent, table.first)
            yield WindowEntries(number, sequence.slot, first, tuple(table.pages[first:]))

    def _taken(self, sequence: Sequence, end: int) -> int:
        """Tokens that have pages once a chunk has ended at `end`: the last one of a sequence that was preempted may be
        run as a decode, which takes none as long as those of all tokens suffice."""
        return end + (end == len(sequence.tokens) - 1)


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
