"""The prefix tree: pages whose tokens are known, kept for requests that begin with the same tokens (RadixAttention,
Zheng et al. 2024)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata.cache.pages import PageAllocator


class Elsewhere(Protocol):
    """Keeps the contents of full pages in places of its own. A place has a number that no page of the pool has; a plan
    that brings its contents into the pool names it as what a page is copied from."""

    def find(self, tokens: Sequence[int], extra_key: Hashable, first: int, most: int) -> Sequence[int]:
        """The places of full pages that `tokens` begin with: of the pages `first`, `first` + 1 and so on, without a
        gap, and none from `most` on. extra_key: as in `PrefixTree`."""

    def lose(self, place: int) -> None:
        """Its contents could not be brought: it is not found again."""


class Attached(Protocol):
    """What the tree keeps for its pages beside them: other state of the same tokens, of which some may be gone."""

    def covered(self, path: Sequence[int], most: int) -> int:
        """After how many of the first `most` pages of a path a sequence finds all that it needs to go on."""

    def detach(self, page: int) -> None:
        """A page leaves the tree, and with it what is kept for it."""


@dataclass(slots=True, eq=False)
class _Node:
    """An edge of the tree and its lower end: a run of full pages and what may follow it.

    tokens: the ids in `pages`, page_size for each.
    children: by the ids of their first page.
    """

    extra_key: Hashable
    parent: _Node | None
    tokens: list[int]
    pages: list[int]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixTree:
    """Full pages by the tokens that they and all pages before them hold; one tree for each `extra_key`, which stands
    for all else that keys and values depend on, and separates those who may not share.

    Whoever holds a page of the tree holds all pages above it, and pages are let go deepest first. So the order in which
    pages fell idle (`PageAllocator`) is an eviction order that takes the least recently used leaves first.

    Layers that keep something else than rows of all tokens have it `attached` to the same pages. A hit then ends where
    all of it is there, at the deepest such page.

    A page may be shared while the step that fills it is under way. It is verified once a draw has read it and given an
    id, and with it all pages above; what a draw that gave none has read, `invalidate` takes out of the tree.
    """

    def __init__(self, pages: PageAllocator, attached: Sequence[Attached] = ()) -> None:
        self._pages = pages
        self._attached = tuple(attached)
        self.clear()

    def clear(self) -> None:
        """Forget all pages without letting go of them: the allocator is cleared as well."""
        self._roots: dict[Hashable, _Node] = {}
        self._owners: dict[int, _Node] = {}
        self._verified: set[int] = set()

    def __len__(self) -> int:
        """Pages in the tree."""
        return len(self._owners)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __contains__(self, page: int) -> bool:
        return page in self._owners

    def match(self, tokens: list[int], extra_key: Hashable = "") -> list[int]:
        """The longest run of cached pages that `tokens` begin with, each now held once more.

        At least one token is left over, because something must be computed to sample from.
        """
        path = self._descend(tokens, (len(tokens) - 1) // self._pages.page_size, extra_key)[2]
        if self._attached:
            path = path[: self._covered(path)]
        for page in path:
            self._pages.share(page)
        return path

    def depth(self, tokens: list[int], extra_key: Hashable = "") -> int:
        """How many pages of what `tokens` begin with it has, whatever is attached; a token is left over."""
        return len(self._descend(tokens, (len(tokens) - 1) // self._pages.page_size, extra_key)[2])

    def insert(self, tokens: list[int], pages: list[int], extra_key: Hashable = "") -> list[int]:
        """Make the full `pages` of a running sequence matchable; `tokens` begin with the ids that they hold. Returns
        the pages that it has for these tokens now.

        Nothing is added below a page of which the tree has another copy: the sequence does not hold that copy, so it
        could be evicted above the sequence's own pages.
        """
        node, taken, path = self._descend(tokens, len(pages), extra_key)
        known = len(path)
        if known < len(pages) and (not known or path[-1] == pages[known - 1]):
            self._extend(node, taken, tokens, pages, known)
            path += pages[known:]
        return path

    def release(self, tokens: list[int], pages: list[int], extra_key: Hashable = "") -> list[int]:
        """Release all `pages` of a sequence that ends or pauses, and keep in the tree those that `tokens` fill.

        Where the tree has a copy already, it keeps that copy and counts it as used now. Returns the pages that it has
        for these tokens now.
        """
        full = min(len(tokens) // self._pages.page_size, len(pages))
        node, taken, path = self._descend(tokens, full, extra_key)
        known = len(path)
        if known and path[-1] != pages[known - 1]:
            # A page that another sequence holds too must not hang below a copy that this other one does not hold.
            full = next((i for i in range(known, full) if self._pages.is_shared(pages[i])), full)
        if known < full:
            self._extend(node, taken, tokens, pages[:full], known)
        for index in range(len(pages) - 1, -1, -1):
            self._pages.release(pages[index])
            if index < known and path[index] != pages[index]:
                self._pages.touch(path[index])
        return path + pages[known:full]

    def evict(self, count: int) -> int:
        """Free up to `count` idle pages, least recently used leaves first; returns how many were freed."""
        for freed in range(count):
            page = self._pages.oldest_idle()
            if page is None:
                return freed
            node = self._owners.pop(page)
            self._verified.discard(page)
            self._detach_all(page)
            if node.pages.pop() != page or node.children:
                raise AssertionError(f"page {page} fell idle before a page below it")
            last = tuple(node.tokens[-self._pages.page_size :])
            del node.tokens[-self._pages.page_size :]
            self._pages.uncache(page)
            if not node.pages:
                self._detach(node, last)
        return count

    def verify(self, pages: list[int]) -> None:
        """A draw has read these pages and given an id; those that are not in the tree do not matter."""
        self._verified.update(page for page in pages if page in self._owners)

    def invalidate(self, tokens: list[int], extra_key: Hashable = "") -> None:
        """A draw that read the pages of `tokens` gave no id: its logits held NaN.

        The first page that is not verified leaves the tree with all that hangs below it. The pages before are not
        verified any more: if the fault is theirs, the next failure takes them out.
        """
        path = self._descend(tokens, len(tokens) // self._pages.page_size, extra_key)[2]
        known = next((index for index, page in enumerate(path) if page not in self._verified), len(path))
        self._verified.difference_update(path[:known])
        if known < len(path):
            self._remove_from(path[known])

    def check(self) -> None:
        """Raise AssertionError unless the tree is well formed. Takes time in proportion to the tree."""
        size = self._pages.page_size
        seen: dict[int, _Node] = {}
        order = {page: place for place, page in enumerate(self._pages.idle_pages())}
        for root in self._roots.values():
            assert root.children, "an empty root is left"
            nodes = [(root, len(order))]
            while nodes:
                node, above = nodes.pop()
                assert bool(node.pages) == (node is not root), "a node without pages, or a root with pages"
                assert len(node.tokens) == len(node.pages) * size, "a node with other than full pages"
                for page in node.pages:
                    place = order.get(page, len(order))
                    assert place < above or place == above == len(order), f"page {page} is idle after the one above"
                    assert page not in seen, f"page {page} is twice in the tree"
                    seen[page] = node
                    above = place
                for key, child in node.children.items():
                    assert child.parent is node, "a child with another parent"
                    assert key == tuple(child.tokens[:size]), "a child under another key"
                    nodes.append((child, above))
        assert seen == self._owners, "the owners of pages disagree with the tree"
        assert self._verified <= self._owners.keys(), "a verified page that is not in the tree"

    def _descend(self, tokens: list[int], count: int, extra_key: Hashable) -> tuple[_Node, int, list[int]]:
        """Follow the first `count` full pages of `tokens`: the last node reached, how many of its pages agree, and all
        pages passed."""
        size = self._pages.page_size
        node = self._roots.get(extra_key) or _Node(extra_key, None, [], [])
        path: list[int] = []
        taken = 0
        while len(path) < count:
            begin = len(path) * size
            child = node.children.get(tuple(tokens[begin : begin + size]))
            if child is None:
                break
            node, most = child, min(len(child.pages), count - len(path))
            taken = self._agreement(node.tokens, tokens, begin, most)
            path += node.pages[:taken]
            if taken < len(node.pages):
                break
        return node, taken, path

    def _agreement(self, ours: list[int], tokens: list[int], begin: int, most: int) -> int:
        """How many of the first `most` pages of a node hold the ids of `tokens` from `begin` on; the first one does."""
        size = self._pages.page_size
        agreeing, end = 1, most
        while agreeing < end:  # halves, unless all agree: long runs are compared whole
            upto = end if end == most else (agreeing + end + 1) // 2
            if ours[agreeing * size : upto * size] == tokens[begin + agreeing * size : begin + upto * size]:
                agreeing = upto
            else:
                end = upto - 1
        return agreeing

    def _extend(self, node: _Node, taken: int, tokens: list[int], pages: list[int], known: int) -> None:
        """Hang `pages[known:]` below the first `taken` pages of `node`."""
        size = self._pages.page_size
        if node.parent is None:
            self._roots[node.extra_key] = node
        elif taken < len(node.pages):
            node = self._split(node, taken)
        if node.parent is None or node.children:
            child = _Node(node.extra_key, node, [], [])
            node.children[tuple(tokens[known * size : (known + 1) * size])] = child
            node = child
        node.tokens += tokens[known * size : len(pages) * size]
        node.pages += pages[known:]
        for page in pages[known:]:
            self._pages.cache(page)
            self._owners[page] = node

    def _remove_from(self, page: int) -> None:
        """Let go of a page and of all pages below it."""
        node = self._owners[page]
        if place := node.pages.index(page):
            self._split(node, place)
        self._detach(node, tuple(node.tokens[: self._pages.page_size]))
        nodes = [node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            for page in node.pages:
                del self._owners[page]
                self._verified.discard(page)
                self._detach_all(page)
                self._pages.uncache(page)

    def _covered(self, path: list[int]) -> int:
        """After how many pages of a path everything that is attached is there."""
        most, before = len(path), -1
        while most != before:
            before = most
            for kind in self._attached:
                most = kind.covered(path, most)
        return most

    def _detach_all(self, page: int) -> None:
        for kind in self._attached:
            kind.detach(page)

    def _detach(self, node: _Node, first_page: tuple[int, ...]) -> None:
        """Take a node from its parent; a root without children goes too."""
        parent = node.parent
        assert parent is not None
        del parent.children[first_page]
        if parent.parent is None and not parent.children:
            del self._roots[node.extra_key]

    def _split(self, node: _Node, taken: int) -> _Node:
        """Cut a node after its first `taken` pages; returns the new node that holds these."""
        assert node.parent is not None
        size = self._pages.page_size
        upper = _Node(node.extra_key, node.parent, node.tokens[: taken * size], node.pages[:taken])
        node.parent.children[tuple(upper.tokens[:size])] = upper
        del node.tokens[: taken * size], node.pages[:taken]
        node.parent = upper
        upper.children[tuple(node.tokens[:size])] = node
        for page in upper.pages:
            self._owners[page] = upper
        return upper
