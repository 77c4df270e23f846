"""Page reference counts against a plain model: a count and a flag for each page, and a list of idle pages."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.cache.pages import PageAllocator


class Books(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, 20))
    def start(self, pages: int) -> None:
        self.pages = PageAllocator(pages, 4)
        self.held: list[int] = []
        self.cached: list[int] = []
        self.idle: list[int] = []

    @rule(after=st.integers(0, 20))
    def allocate(self, after: int) -> None:
        taken = {*self.held, *self.cached}
        hint = after if after < self.pages.num_pages else None
        if len(taken) == self.pages.num_pages:
            with pytest.raises(IndexError):
                self.pages.allocate(hint)
            return
        page = self.pages.allocate(hint)
        assert page not in taken
        if hint is not None and hint + 1 < self.pages.num_pages and hint + 1 not in taken:
            assert page == hint + 1
        self.held.append(page)

    @precondition(lambda self: self.held or self.cached)
    @rule(which=st.integers(0, 100))
    def share(self, which: int) -> None:
        page = [*self.held, *self.cached][which % (len(self.held) + len(self.cached))]
        self.pages.share(page)
        self.held.append(page)
        if page in self.idle:
            self.idle.remove(page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        page = self.held.pop(which % len(self.held))
        self.pages.release(page)
        if page in self.cached and page not in self.held:
            self.idle.append(page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def cache(self, which: int) -> None:
        page = self.held[which % len(self.held)]
        if page in self.cached:
            with pytest.raises(ValueError, match="cached"):
                self.pages.cache(page)
            return
        self.pages.cache(page)
        self.cached.append(page)

    @precondition(lambda self: self.idle)
    @rule()
    def uncache(self) -> None:
        page = self.pages.oldest_idle()
        assert page == self.idle.pop(0)
        self.pages.uncache(page)
        self.cached.remove(page)

    @rule(page=st.integers(0, 19))
    def touch(self, page: int) -> None:
        page %= self.pages.num_pages
        self.pages.touch(page)
        if page in self.idle:
            self.idle.remove(page)
            self.idle.append(page)

    @rule(page=st.integers(0, 19))
    def let_go_of_what_nobody_holds(self, page: int) -> None:
        page %= self.pages.num_pages
        if page not in self.held:
            with pytest.raises(ValueError, match="released"):
                self.pages.release(page)
            if page not in self.cached:
                with pytest.raises(ValueError, match="shared"):
                    self.pages.share(page)
                with pytest.raises(ValueError, match="cached"):
                    self.pages.cache(page)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pages"):
            return
        holders = Counter([*self.held, *self.cached])
        assert self.pages.free == self.pages.num_pages - len(holders)
        assert self.pages.idle_pages() == tuple(self.idle)
        assert self.pages.idle == len(self.idle)
        assert self.pages.usage == pytest.approx(len(set(self.held)) / self.pages.num_pages)
        for page in range(self.pages.num_pages):
            assert self.pages.is_shared(page) == (holders[page] > 1)
        self.pages.check(self.held, self.cached)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_one_sequence_gets_a_fresh_pool_in_order() -> None:
    pages = PageAllocator(21, 16)
    order = [pages.allocate()]
    while pages.free:
        order.append(pages.allocate(after=order[-1]))
    assert order == list(range(21))


def test_sequences_that_grow_at_once_get_runs_of_neighbours() -> None:
    pages = PageAllocator(64, 16)
    grown: list[list[int]] = [[], [], [], []]
    while pages.free:
        for sequence in grown:
            sequence.append(pages.allocate(after=sequence[-1] if sequence else None))
    for sequence in grown:
        breaks = sum(after != before + 1 for before, after in pairwise(sequence))
        assert breaks <= len(sequence) / 8 - 1


def test_a_sequence_grows_into_what_is_freed_beside_it() -> None:
    pages = PageAllocator(32, 16)
    held = [pages.allocate(after=page - 1 if page else None) for page in range(32)]
    for page in held[10:20]:
        pages.release(page)
    page = 9
    for expected in range(10, 20):
        page = pages.allocate(after=page)
        assert page == expected


def test_check_finds_a_lost_and_an_unknown_holder() -> None:
    pages = PageAllocator(4, 16)
    page = pages.allocate()
    pages.check([page], [])
    with pytest.raises(AssertionError, match="references"):
        pages.check([], [])
    with pytest.raises(AssertionError, match="references"):
        pages.check([page, page], [])
    with pytest.raises(AssertionError, match="cached"):
        pages.check([], [page])


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(pages, size)
