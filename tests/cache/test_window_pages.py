"""A prefix goes on where its last window is whole, and what a sequence computes again repairs a window that is not."""

from __future__ import annotations

import pytest
import torch

from strata.cache import window_pages
from strata.cache.groups import PageGroup, divide_pages
from strata.cache.pages import PageAllocator
from strata.cache.pool import PoolShape
from strata.cache.prefix import PrefixTree
from strata.cache.window_pages import WindowPages, WindowTable

PAGE = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_pages, "KEY_BLOCK", 4)


class Books:
    """Sequences over a tree with one window of 6 tokens: a token at a page's begin reads two pages before it."""

    def __init__(self, pages: int) -> None:
        self.window = WindowPages(pages, PAGE, 6)
        self.pages = PageAllocator(40, PAGE)
        self.tree = PrefixTree(self.pages, [self.window])

    def run(self, tokens: list[int]) -> int:
        """A sequence finds what it can, computes the rest page by page and ends; how many pages it found."""
        path = self.tree.match(tokens)
        self.window.hold(path)
        found, table = len(path), self.window.begin(path)
        while len(path) * PAGE < len(tokens):
            path.append(self.pages.allocate())
            self.window.trim(table, (len(path) - 1) * PAGE)
            self.window.extend(table, len(path))
            self.tree.insert(tokens, path[: len(tokens) // PAGE])
            self._attach(path, table)
        self._attach(self.tree.release(tokens, path), table)
        self.window.drop(table)
        self.window.check([], self.tree)
        return found

    def _attach(self, path: list[int], table: WindowTable) -> None:
        for place in range(table.first, len(path)):
            if path[place] in self.tree:
                self.window.attach(path[place], table, place)


def test_a_hit_ends_at_the_deepest_page_behind_which_the_window_is_kept() -> None:
    books = Books(30)
    prompt = list(range(40))
    assert books.run(prompt) == 0
    assert books.run(prompt) == 9  # a token is left to compute
    path = books.tree.match([*prompt, 99])
    assert len(path) == 10
    for page in reversed(path):
        books.pages.release(page)
    books.window.detach(path[7])
    # Token 36 reads from 31 on, which lies in page 7; token 28 reads pages 5 and 6.
    assert books.window.covered(path, 9) == 7
    assert books.run([*prompt[:30], 99, 98]) == 7
    # The sequence that found 7 pages has computed pages 7 to 9 again, and the tree keeps their windows now.
    assert books.run(prompt) == 7
    assert books.run(prompt) == 9


def test_windows_are_given_up_while_pages_of_all_tokens_stay() -> None:
    books = Books(5)
    prompt = list(range(40))
    assert books.run(prompt) == 0
    assert len(books.tree) == 10
    other = list(range(50, 90))
    books.run(other)
    assert len(books.tree) == 20
    assert books.run(other) == 9
    assert books.run(prompt) == 0
    assert books.window.books.free + books.window.books.idle == 5


def test_memory_is_divided_so_that_no_window_has_more_than_is_of_use() -> None:
    shape = PoolShape(4, PAGE, 2, 8, torch.float32)
    groups = [PageGroup((0, 1, 2, 3), None, shape), PageGroup((4, 5, 6, 7), 8, shape)]
    assert divide_pages(groups, 100 * shape.page_bytes, [None, 1000]) == (50, 50)
    assert divide_pages(groups, 100 * shape.page_bytes, [None, 20]) == (80, 20)
    assert divide_pages(groups[1:], 100 * shape.page_bytes, [20]) == (100,)
