"""The pages of layers that see a window of the latest tokens: those that lie wholly behind it are given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.cache.pages import PageAllocator

# Attention reads keys in aligned blocks of so many at most, also those in front of the window that a block begins with.
KEY_BLOCK = 128


@dataclass(slots=True)
class WindowTable:
    """The pages of one sequence, one for each of its pages of all tokens. Those before `first` are given back."""

    pages: list[int]
    first: int = 0

    @property
    def live(self) -> list[int]:
        return self.pages[self.first :]


class WindowPages:
    """Who holds each page of a window's pool. `books` counts references and idle pages as for any pool.

    A page belongs to the same tokens as the page of all tokens at the same place of the sequence's table. The prefix
    tree keeps it for that page, as long as it has room: a hit that ends at a page needs those of the window before.
    """

    def __init__(self, num_pages: int, page_size: int, window: int) -> None:
        self.books = PageAllocator(num_pages, page_size)
        self.window = window
        self._of: dict[int, int] = {}  # what the tree keeps for a page of all tokens
        self._for: dict[int, int] = {}  # and for which page it keeps each

    @property
    def max_pages(self) -> int:
        """Pages that a sequence holds at most between steps; in a step, one more for each page of its tokens."""
        return page_limit(self.window, self.books.page_size)

    def clear(self) -> None:
        """All pages are free, and the tree keeps none."""
        self.books.clear()
        self._of.clear()
        self._for.clear()

    def first_page(self, start: int) -> int:
        """The first page of a sequence that its token at position `start`, or a later one, may read."""
        return max(0, start + 1 - self.window) // KEY_BLOCK * KEY_BLOCK // self.books.page_size

    def fitting(self, table: WindowTable | None, start: int, count: int) -> int:
        """How many of the `count` tokens from `start` on there are pages for, if those that only the tree keeps are
        taken too. table: None: the sequence has its first `start` tokens from the tree."""
        books = self.books
        held = start // books.page_size if table is None else len(table.pages)
        return min(count, (held + books.free + books.idle) * books.page_size - start)

    def make_space(self, pages: int = 1) -> bool:
        """Whether so many pages are free, if need be some that only the tree keeps: those that are idle longest."""
        while self.books.free < pages:
            page = self.books.oldest_idle()
            if page is None:
                return False
            self.detach(self._for[page])
        return True

    def extend(self, table: WindowTable, pages: int) -> None:
        """Let a sequence have so many pages in all; the room was asked for."""
        while len(table.pages) < pages:
            if not self.make_space():
                raise IndexError("no page of the window's pool is free")
            after = table.pages[-1] if len(table.pages) > table.first else None
            table.pages.append(self.books.allocate(after))

    def trim(self, table: WindowTable, start: int) -> None:
        """Give back what lies behind the window of the token at `start`, the next to be computed, and of all later."""
        first = min(self.first_page(start), len(table.pages))
        for page in table.pages[table.first : first]:
            self.books.release(page)
        table.first = max(table.first, first)

    def fork(self, table: WindowTable) -> WindowTable:
        """The same pages for another sequence."""
        for page in table.live:
            self.books.share(page)
        return WindowTable(list(table.pages), table.first)

    def replace_last(self, table: WindowTable) -> tuple[int, int]:
        """Another page in place of the last, which others hold: what is to be copied, from and to."""
        old = table.pages[-1]
        new = table.pages[-1] = self.books.allocate(old)
        self.books.release(old)
        return old, new

    def drop(self, table: WindowTable) -> None:
        """Give back all pages of a sequence."""
        for page in reversed(table.live):
            self.books.release(page)

    # What follows concerns the prefix tree. path: its pages of all tokens, from a sequence's first on.

    def covered(self, path: Sequence[int], most: int) -> int:
        """After how many of the first `most` pages of a path a sequence can go on: the window before is kept."""
        end = most
        while end:
            first = self.first_page(end * self.books.page_size)
            missing = next((place for place in range(end - 1, first - 1, -1) if path[place] not in self._of), None)
            if missing is None:
                return end
            end = missing
        return 0

    def wanted(self, path: Sequence[int]) -> int:
        """Pages that a sequence which begins with a covered path needs at most at once, beside those of the path."""
        return max(1, self.max_pages + 1 - len(self._window(path)))

    def hold(self, path: Sequence[int]) -> None:
        """A sequence that begins with a covered path holds the pages of its window once more."""
        for page in self._window(path):
            self.books.share(page)

    def release(self, path: Sequence[int]) -> None:
        """Take back what `hold` did."""
        for page in reversed(self._window(path)):
            self.books.release(page)

    def begin(self, path: Sequence[int]) -> WindowTable:
        """The table of a sequence that holds the window of a covered path."""
        held = self._window(path)
        first = len(path) - len(held)
        return WindowTable([0] * first + held, first)

    def attach(self, page: int, table: WindowTable, place: int) -> None:
        """The tree keeps what a sequence has at `place` for a page of all tokens, unless it keeps something already."""
        if place < table.first:
            return
        kept, own = self._of.get(page), table.pages[place]
        if kept is not None:
            if kept != own:
                self.books.touch(kept)
        elif own not in self._for:
            self.books.cache(own)
            self._of[page], self._for[own] = own, page

    def detach(self, page: int) -> None:
        """The tree keeps nothing any more for a page of all tokens."""
        kept = self._of.pop(page, None)
        if kept is not None:
            del self._for[kept]
            self.books.uncache(kept)

    def check(self, tables: Iterable[WindowTable], tree: Iterable[int]) -> None:
        """Raise AssertionError unless the books agree with the tables of sequences and the pages of the tree."""
        assert self._of.keys() <= set(tree), "a page of a window is kept for a page that is not in the tree"
        assert {kept: page for page, kept in self._of.items()} == self._for, "a page is kept for two pages"
        self.books.check((page for table in tables for page in table.live), self._for)

    def _window(self, path: Sequence[int]) -> list[int]:
        return [self._of[page] for page in path[self.first_page(len(path) * self.books.page_size) :]]


def page_limit(window: int, page_size: int) -> int:
    """Pages of the tokens that one token of a sequence may read of a window, whole blocks of keys, and a page that has
    only begun."""
    return -(-(window - 1 + KEY_BLOCK - 1) // page_size) + 1
