"""Pages for sequences: those that they begin with, those that they grow into, and whose are taken when there are no
more; and what running sequences draw next, a row for the newest id of each and rows for drafts behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from itertools import chain
from typing import Literal

from strata.cache.pages import PageAllocator, SharedKeys
from strata.cache.window_pages import WindowPages
from strata.engine.plan import Chunk, StepPlan, WindowEntries
from strata.engine.request import Sequence
from strata.engine.scheduling.builder import PlanBuilder
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.prompt_budget import InLine
from strata.engine.scheduling.queues import Queues
from strata.engine.scheduling.states import States


class Windows:
    """The scheduler's side of window pages: a table of a sequence has as many entries as it has pages of all tokens
    that are computed or planned. What lies behind the window is given back before more is taken."""

    def __init__(self, groups: Listed[WindowPages]) -> None:
        self.groups = tuple(groups)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages of each group that are free or that only the prefix tree keeps."""
        return tuple(group.books.free + group.books.idle for group in self.groups)

    def lack(self, pages: int, found: list[int], reserved: int) -> bool:
        """Whether a sequence that needs so many pages of all tokens behind those that were found, or of a window as
        many as it holds at once, must wait for others to end. reserved: pages that it has to leave to others."""
        return any(
            min(pages, group.wanted(found)) > room - reserved
            for group, room in zip(self.groups, self.free_pages, strict=True)
        )

    def make_space(self, pages: int) -> bool:
        """Whether each group has so many free pages, if need be some that only the tree has kept."""
        return all(group.make_space(pages) for group in self.groups)

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
        for number, table in enumerate(sequence.windows):
            first = max(sent, table.first)
            yield WindowEntries(number, sequence.slot, first, tuple(table.pages[first:]))

    def _taken(self, sequence: Sequence, end: int) -> int:
        """Tokens that have pages once a chunk has ended at `end`: the last one of a sequence that was preempted may be
        run as a decode, which takes none as long as those of all tokens suffice."""
        return end + (end == len(sequence.tokens) - 1)


class Admission:
    """Finds and takes the pages of those that are to run."""

    def __init__(self, pages: PageAllocator, prefixes: Prefixes, queues: Queues, windows: Windows | None) -> None:
        self._pages, self._prefixes, self._queues, self._windows = pages, prefixes, queues, windows
        self._coming = prefixes.transfers.keys
        self._refusal: tuple[Sequence, int, tuple[int, ...]] | None = None

    def clear(self) -> None:
        """Forget who was refused, and when."""
        self._refusal = None

    @property
    def stays_refused(self) -> bool:
        """Whether the first that waits was refused for want of pages and will be as long as those that run only grow.
        With a prefix tree it is looked for anew, which counts as a use of what is found."""
        if self._refusal is None or self._prefixes.has_tree or not self._queues.waiting:
            return False
        sequence, room, _ = self._refusal
        has_no_more = self._pages.free + self._pages.idle - len(self._queues.running) <= room
        return has_no_more and sequence is self._queues.waiting[0]

    def find(self, sequence: Sequence, reserved: int) -> list[int] | Literal["loading"] | None:
        """The cached pages that a waiting sequence begins with, now its own; None if it must wait for others to end, or
        "loading" for pages that come from elsewhere, from now on if not already. reserved: pages that it has to leave
        to others."""
        if sequence.awaited in self._coming:
            return "loading"
        # A page is left for each running sequence: what is admitted must not be preempted at once.
        reserved += len(self._queues.running)
        room = self._pages.free + self._pages.idle - reserved
        refusal = sequence, room, () if self._windows is None else self._windows.free_pages
        # An id that is under way (the sequence was preempted just now) is on the device in its former slot only.
        if sequence.pending or self._refusal == refusal:
            return None
        found = self._prefixes.match(sequence)
        if self._coming and (next_page := self._prefixes.next_page(sequence, found)) in self._coming:
            self._prefixes.release(found)
            sequence.awaited = next_page
            return "loading"
        lacks = self.wanted(sequence, found) > self._pages.free + self._pages.idle - reserved
        if lacks or (self._windows is not None and self._windows.lack(self.wanted(sequence, found), found, reserved)):
            self._prefixes.release(found)
            self._refusal = refusal
            return None
        self._refusal = None
        return "loading" if self._prefixes.bring(sequence, found) else found

    def in_line(self, prefilling: list[Sequence], now: float) -> Iterator[InLine]:
        """Whose prompts nothing but other prompts holds up: those that run, and those that could. now: seconds, by the
        clock of `Scheduler.schedule`."""
        for sequence in chain(prefilling, self._able()):
            if sequence.in_line is None:
                sequence.in_line, sequence.cached = now, self._prefixes.cached(sequence)
            known = sequence.computed if sequence.pages else sequence.cached
            yield InLine(known, len(sequence.tokens) - known, now - sequence.in_line)

    def _able(self) -> Iterator[Sequence]:
        """Those that wait and find slots and pages, even if none is cached. The others wait for those that run to end,
        however many tokens of prompts a step takes."""
        room = self._pages.free + self._pages.idle - len(self._queues.running)
        for sequence in self._queues.waiting[: self._queues.free_slots]:
            wanted = self._pages.pages_for(len(sequence.tokens))
            if wanted > room:
                return
            room -= wanted + 1  # the one that is left for each that runs
            yield sequence

    def wanted(self, sequence: Sequence, found: list[int]) -> int:
        """How many pages a sequence needs behind those that were found for it."""
        return self._pages.pages_for(len(sequence.tokens)) - len(found)

    def take(self, sequence: Sequence, found: list[int]) -> list[int]:
        """All pages of what a sequence has to prefill, behind those that were found for it."""
        wanted, pages = self.wanted(sequence, found), list(found)
        self._prefixes.evict(max(0, wanted - self._pages.free))
        for _ in range(wanted):
            pages.append(self._pages.allocate(after=pages[-1] if pages else None))
        return pages


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
        windows = () if self._windows is None else self._windows.free_pages
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
        return self._windows is None or self._windows.make_space(pages)

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
