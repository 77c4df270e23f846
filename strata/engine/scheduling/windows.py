"""What sequences hold of layers with windows, beside their pages of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listed

from strata.cache.window_pages import WindowPages
from strata.engine.plan import WindowEntries
from strata.engine.request import Sequence


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
