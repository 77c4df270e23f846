"""The prefix tree against a table of all cached prefixes, and its order of eviction against a scan for the LRU leaf."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree

Key = tuple[str, tuple[int, ...]]


class Tree(RuleBasedStateMachine):
    """Sequences match, compute, insert and release; `table` maps each cached prefix (salt, tokens) to its page."""

    @initialize(pages=st.integers(4, 24), size=st.integers(1, 3))
    def start(self, pages: int, size: int) -> None:
        self.size = size
        self.pages = PageAllocator(pages, size)
        self.tree = PrefixTree(self.pages)
        self.table: dict[Key, int] = {}
        self.used: dict[int, int] = {}  # when the page of the tree was last let go of or asked for
        self.running: list[tuple[list[int], list[int], str]] = []
        self.verified: set[int] = set()
        self.now = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "", "salt"]))
    def begin(self, tokens: list[int], salt: str) -> None:
        expected = []
        while (len(expected) + 1) * self.size < len(tokens):
            page = self.table.get(self._key(tokens, len(expected), salt))
            if page is None:
                break
            expected.append(page)
        pages = self.tree.match(tokens, salt)
        assert pages == expected
        self.now += 1
        while len(pages) * self.size < len(tokens) and self.pages.free:
            pages.append(self.pages.allocate())
        self.running.append((tokens[: len(pages) * self.size], pages, salt))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), share=st.floats(0, 1))
    def insert(self, which: int, share: float) -> None:
        tokens, pages, salt = self.running[which % len(self.running)]
        full = pages[: int(len(tokens) // self.size * share)]
        self.tree.insert(tokens, full, salt)
        for index, page in enumerate(full):
            if self.table.setdefault(self._key(tokens, index, salt), page) != page:
                break

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), known=st.floats(0.5, 1))
    def release(self, which: int, known: float) -> None:
        tokens, pages, salt = self.running.pop(which % len(self.running))
        tokens = tokens[: round(len(tokens) * known)]
        others = {page for _, held, _ in self.running for page in held}
        self.tree.release(tokens, pages, salt)
        self.now += 1
        copied = False
        for index in range(len(tokens) // self.size):
            key = self._key(tokens, index, salt)
            if key not in self.table and copied and pages[index] in others:
                break
            page = self.table.setdefault(key, pages[index])
            copied |= page != pages[index]
            self.used[page] = self.now
        for page in pages:
            self.used[page] = self.now

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def fork(self, which: int) -> None:
        tokens, pages, salt = self.running[which % len(self.running)]
        for page in pages:
            self.pages.share(page)
        self.running.append((list(tokens), list(pages), salt))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        held = {page for _, pages, _ in self.running for page in pages}
        expected = 0
        for _ in range(count):
            leaves = [
                key
                for key, page in self.table.items()
                if page not in held and not any(self._below(other, key) for other in self.table)
            ]
            if leaves:
                least = min(leaves, key=lambda key: (self.used[self.table[key]], -len(key[1])))
                self.verified.discard(self.table.pop(least))
                expected += 1
        assert self.tree.evict(count) == expected

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def verify(self, which: int) -> None:
        _, pages, _ = self.running[which % len(self.running)]
        self.tree.verify(pages)
        self.verified |= set(pages) & set(self.table.values())

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def invalidate(self, which: int) -> None:
        tokens, _, salt = self.running[which % len(self.running)]
        self.tree.invalidate(tokens, salt)
        for index in range(len(tokens) // self.size):
            key = self._key(tokens, index, salt)
            page = self.table.get(key)
            if page not in self.verified:
                gone = [other for other in self.table if other == key or self._below(other, key)]
                self.verified -= {self.table.pop(other) for other in gone}
                break
            self.verified.discard(page)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert sorted(self.tree) == sorted(self.table.values())
        assert len(self.tree) == len(self.table)
        self.tree.check()
        self.pages.check([page for _, pages, _ in self.running for page in pages], self.tree)

    def _key(self, tokens: list[int], index: int, salt: str) -> Key:
        return salt, tuple(tokens[: (index + 1) * self.size])

    def _below(self, other: Key, key: Key) -> bool:
        return other[0] == key[0] and len(other[1]) > len(key[1]) and other[1][: len(key[1])] == key[1]


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def cached(tree: PrefixTree, pages: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    """Compute `tokens` as a sequence would and leave it in the tree; returns the pages it used."""
    own = tree.match(tokens, salt)
    while len(own) * pages.page_size < len(tokens):
        own.append(pages.allocate())
    tree.release(tokens, own, salt)
    return own


def test_one_token_is_always_left_to_compute() -> None:
    pages = PageAllocator(16, 4)
    tree = PrefixTree(pages)
    own = cached(tree, pages, list(range(12)))
    assert tree.match(list(range(12))) == own[:2]
    assert tree.match([*range(12), 99]) == own
    assert tree.match([0]) == []


def test_the_longest_common_run_of_full_pages_is_found_inside_an_edge() -> None:
    pages = PageAllocator(16, 4)
    tree = PrefixTree(pages)
    own = cached(tree, pages, list(range(16)))
    assert tree.match([*range(11), 99, 99, 99]) == own[:2]
    tree.check()


def test_salts_do_not_see_each_other() -> None:
    pages = PageAllocator(16, 4)
    tree = PrefixTree(pages)
    mine = cached(tree, pages, list(range(9)), "mine")
    yours = cached(tree, pages, list(range(9)), "yours")
    assert not set(mine[:2]) & set(yours)
    assert tree.match(list(range(9))) == []
    assert tree.match(list(range(9)), "mine") == mine[:2]


def test_the_least_recently_used_leaf_goes_first_and_its_tail_before_its_head() -> None:
    pages = PageAllocator(16, 2)
    tree = PrefixTree(pages)
    first = cached(tree, pages, [0, 0, 1, 1, 2, 2])
    second = cached(tree, pages, [0, 0, 5, 5, 6, 6])
    assert second[0] == first[0]
    cached(tree, pages, [0, 0, 1, 1, 2, 2, 3])  # uses the first again
    order = []
    while len(tree):
        before = set(tree)
        assert tree.evict(1) == 1
        order += before - set(tree)
    assert order == [second[2], second[1], first[2], first[1], first[0]]
    assert pages.free == 16
    assert tree.evict(1) == 0


def test_what_a_sequence_holds_is_not_evicted() -> None:
    pages = PageAllocator(8, 2)
    tree = PrefixTree(pages)
    own = cached(tree, pages, [0, 0, 1, 1, 2, 2])
    held = tree.match([0, 0, 1, 1, 9])
    assert held == own[:2]
    assert tree.evict(8) == 1
    for page in reversed(held):
        pages.release(page)
    assert tree.evict(8) == 2


def test_a_copy_computed_by_another_sequence_is_released_and_the_trees_kept() -> None:
    pages = PageAllocator(8, 2)
    tree = PrefixTree(pages)
    own = [pages.allocate() for _ in range(3)]
    copy = [pages.allocate() for _ in range(4)]
    tree.insert([0, 0, 1, 1, 2, 2], own)
    tree.release([0, 0, 1, 1, 2, 2, 3, 3], copy)
    assert sorted(tree) == sorted([*own, copy[3]])
    assert pages.free == 8 - 4
    pages.check(own, tree)


def test_a_failure_takes_out_what_no_sound_draw_has_read_and_the_next_one_the_rest() -> None:
    pages = PageAllocator(16, 2)
    tree = PrefixTree(pages)
    good = cached(tree, pages, [0, 0, 1, 1])
    tree.verify(good)
    broken = tree.match([0, 0, 1, 1, 9, 9, 8])
    broken.append(pages.allocate())
    tree.insert([0, 0, 1, 1, 9, 9], broken)
    sharer = tree.match([0, 0, 1, 1, 9, 9, 7])
    tree.invalidate([0, 0, 1, 1, 9, 9, 8])
    assert sorted(tree) == sorted(good)
    for held in (broken, sharer):
        tree.release([], held)
    assert pages.free == 14  # the page between went only when both had let go of it
    tree.invalidate([0, 0, 1, 1])
    assert (len(tree), pages.free) == (0, 16)
    tree.check()


def test_eviction_does_not_slow_down_with_the_size_of_the_tree() -> None:
    def seconds(leaves: int) -> float:
        pages = PageAllocator(leaves * 2, 1)
        tree = PrefixTree(pages)
        for leaf in range(leaves):
            cached(tree, pages, [leaf, leaf])
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            assert tree.evict(100) == 100
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(32_000) < 20 * seconds(1_000)  # a scan of the tree would take 32 times as long


def test_check_finds_a_page_under_the_wrong_tokens() -> None:
    pages = PageAllocator(8, 2)
    tree = PrefixTree(pages)
    own = [pages.allocate() for _ in range(2)]
    tokens = [0, 0, 1, 1]
    tree.insert(tokens, own)
    tree.check()
    tree._owners[own[0]].tokens[0] = 7
    with pytest.raises(AssertionError, match="another key"):
        tree.check()


def test_pages_of_a_running_fork_are_not_hung_below_a_copy_it_does_not_hold() -> None:
    pages = PageAllocator(8, 2)
    tree = PrefixTree(pages)
    own = [pages.allocate()]
    forked = [pages.allocate() for _ in range(3)]
    tree.release([0, 0], own)
    for page in forked:
        pages.share(page)
    tree.release([0, 0, 1, 1, 2, 2], forked)
    assert tree.evict(8) == 1  # the copy is free to go, because nothing of the other fork hangs below it
    tree.release([0, 0, 1, 1, 2, 2], forked)
    assert list(tree) == forked
    tree.check()
