"""The pages of the KV pools: who holds each one, which are free, and which only the prefix tree still holds."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

# Pages that a sequence finds beside each other when several grow at once: a CPU reads such a run as one view.
RUN = 8


class SharedKeys(NamedTuple):
    """Tokens on pages that several sequences hold. distinct: each counted once; repeated: once for each sequence that
    holds it but the first."""

    distinct: int = 0
    repeated: int = 0


NONE_SHARED = SharedKeys()


class PageAllocator:
    """Reference counts over `num_pages` pages of `page_size` tokens. Every operation takes constant time.

    A sequence holds a page by `allocate` or `share` and lets go with `release`. The prefix tree holds a page by `cache`
    and lets go with `uncache`; a page that only the tree holds is idle, and idle pages are kept in the order in which
    their last sequence let go of them.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"the KV pool needs at least one page of one token, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """All pages are free, whoever held them."""
        num_pages = self.num_pages
        # Arrays: 14 bytes a page instead of 90, so that a simulation holds the pages of a thousand engines.
        self._references = array("i", bytes(4 * num_pages))
        self._cached = bytearray(num_pages)
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Pages that several sequences hold, and how often beyond the first of each.
        self._shared = self._repeats = 0
        # `_free` in any order, `_index[page]` where in it a free page stands: one is taken from the middle by moving
        # the last one there. Reversed, so that a fresh pool is handed out in ascending order.
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._index = array("i", self._free)
        # Aligned runs of `RUN` pages: how many of each are free, and a stack with every run that is free as a whole.
        # A run may be in the stack (`_stacked`) that no longer is; it is dropped when it comes up.
        runs = num_pages // RUN
        self._free_in_run = bytearray([RUN]) * runs + bytearray([num_pages % RUN])
        self._whole_runs = array("i", range(runs - 1, -1, -1))
        self._stacked = bytearray([1]) * (runs + 1)  # the incomplete run at the end is never put there

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the prefix tree holds."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        """The share of the pages that sequences hold, in [0, 1]."""
        return (self.num_pages - len(self._free) - len(self._idle)) / self.num_pages

    @property
    def shared(self) -> SharedKeys:
        """What sequences share; a page that is not full counts as a full one."""
        return SharedKeys(self._shared * self.page_size, self._repeats * self.page_size)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, after: int | None = None) -> int:
        """A free page, held once. Raises IndexError if none is free.

        It is the page that follows `after` if that is free, else the first of a run of free pages, else any.
        """
        free, index = self._free, self._index
        page = -1 if after is None else after + 1
        if not 0 < page < self.num_pages or self._references[page]:
            page = self._run_start()
        last = free.pop()
        if last != page:
            free[index[page]] = last
            index[last] = index[page]
        self._references[page] = 1
        self._free_in_run[page // RUN] -= 1
        return page

    def share(self, page: int) -> None:
        """One more sequence holds a page that is already held."""
        references = self._references[page]
        if not references:
            raise ValueError(f"page {page} is free: it cannot be shared")
        self._references[page] = references + 1
        holders = references - self._cached[page]
        if holders:
            self._repeats += 1
            self._shared += holders == 1
        else:
            self._idle.pop(page)

    def release(self, page: int) -> None:
        """One sequence lets go; the page is then free, idle or still held by others."""
        references = self._references[page] - 1
        if references < self._cached[page]:
            raise ValueError(f"page {page} is held by no sequence: it cannot be released")
        self._references[page] = references
        holders = references - self._cached[page]
        if holders:
            self._repeats -= 1
            self._shared -= holders == 1
        elif references:
            self._idle[page] = None
        else:
            self._add_free(page)

    def release_all(self, pages: list[int]) -> None:
        """`release` each, the last first."""
        references, cached = self._references, self._cached
        for at in range(len(pages) - 1, -1, -1):
            page = pages[at]
            if references[page] == 1 and not cached[page]:  # nearly all are held by one alone
                references[page] = 0
                self._add_free(page)
            else:
                self.release(page)

    def is_shared(self, page: int) -> bool:
        return self._references[page] > 1

    def cache(self, page: int) -> None:
        """The prefix tree takes hold of a page that a sequence holds."""
        if not self._references[page] or self._cached[page]:
            raise ValueError(f"page {page} is free or already in the prefix tree: it cannot be cached")
        self._references[page] += 1
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """The prefix tree lets go of a page, which is free from then on unless a sequence holds it."""
        self._idle.pop(page, None)
        self._cached[page] = 0
        self._references[page] -= 1
        if not self._references[page]:
            self._add_free(page)

    def oldest_idle(self) -> int | None:
        """The page that has been idle longest, None if none is."""
        return next(iter(self._idle), None)

    def idle_pages(self) -> tuple[int, ...]:
        """All idle pages, the one idle longest first."""
        return tuple(self._idle)

    def touch(self, page: int) -> None:
        """Count a page, if it is idle, as the one most recently let go."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def check(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Raise AssertionError unless the books agree with each other, with the pages that sequences hold (a page once
        for each holder) and with those of the prefix tree. Takes time in proportion to the pool."""
        holders = Counter(held)
        in_tree = set(cached)
        for page in range(self.num_pages):
            references = self._references[page]
            assert references == holders[page] + (page in in_tree), f"page {page}: {references} references"
            assert self._cached[page] == (page in in_tree), f"page {page}: cached flag"
            assert (page in self._idle) == (page in in_tree and not holders[page]), f"page {page}: idle"
            at = self._index[page]
            listed = at < len(self._free) and self._free[at] == page
            assert listed == (references == 0), f"page {page}: {references} references, free {listed}"
        shared = [count for count in holders.values() if count > 1]
        assert (self._shared, self._repeats) == (len(shared), sum(shared) - len(shared)), "shared pages"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        free_in_run = Counter(page // RUN for page in self._free)
        stacked = set(self._whole_runs)
        for run, free in enumerate(self._free_in_run):
            assert free == free_in_run[run], f"run {run}: {free} free"
            assert free < RUN or run in stacked, f"run {run} is whole and not found"

    def _run_start(self) -> int:
        runs = self._whole_runs
        while runs:
            run = runs.pop()
            self._stacked[run] = 0
            if self._free_in_run[run] == RUN:
                return run * RUN
        return self._free[-1]

    def _add_free(self, page: int) -> None:
        self._index[page] = len(self._free)
        self._free.append(page)
        run = page // RUN
        self._free_in_run[run] += 1
        if self._free_in_run[run] == RUN and not self._stacked[run]:
            self._stacked[run] = 1
            self._whole_runs.append(run)
