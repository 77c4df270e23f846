"""What sequences find in the prefix tree, what they leave there, and from when on others may read it.

Pages that come from elsewhere are planned once, waited for by whoever begins with them, and found by all when there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import chain

from strata.cache.pages import PageAllocator
from strata.cache.prefix import Elsewhere, PrefixTree
from strata.cache.window_pages import WindowPages
from strata.engine.plan import TransferEnd
from strata.engine.request import Sequence, Status
from strata.engine.scheduling.states import States

PageKey = tuple[Hashable, tuple[int, ...]]
"""A page by the one before it (the extra key, for the first) and the tokens that it holds."""


def page_key(sequence: Sequence, before: list[int], page_size: int) -> PageKey:
    """Of the page of a sequence that follows those before it."""
    first = len(before) * page_size
    return before[-1] if before else sequence.extra_key, tuple(sequence.tokens[first : first + page_size])


@dataclass(slots=True, eq=False)
class _Transfer:
    """pages: of what a sequence begins with, all held; the last of them come from `places`. key: of the first of these.
    left: how many have not been told. is_whole: so far."""

    sequence: Sequence
    pages: list[int]
    places: dict[int, int]  # by the page that each comes to
    key: PageKey
    left: int
    is_whole: bool = True


class Transfers:
    """Pages in flight. A transfer holds its pages, and those before them, until all have come; then the prefix tree has
    them. What waits for them holds nothing meanwhile."""

    def __init__(self, pages: PageAllocator, tree: PrefixTree | None, elsewhere: Elsewhere | None) -> None:
        """elsewhere: None: nothing ever comes."""
        self._pages, self._tree, self._elsewhere = pages, tree, elsewhere
        self.keys: set[PageKey] = set()  # of the first page that each brings
        self.clear()

    def clear(self) -> None:
        """Forget all; what is still under way is not told any more."""
        self._by_page: dict[int, _Transfer] = {}
        self._unsent: list[tuple[int, int]] = []
        self.keys.clear()

    @property
    def under_way(self) -> bool:
        """Whether any page is in flight, or is to be with the next plan."""
        return bool(self._by_page)

    @property
    def taken(self) -> Iterator[int]:
        """The pages that transfers hold, once for each of them."""
        for transfer in set(self._by_page.values()):
            yield from transfer.pages

    def places(self, sequence: Sequence, found: list[int]) -> Listed[int]:
        """Where the pages are that a sequence could begin with behind those that were found for it."""
        if self._elsewhere is None:
            return ()
        most = (len(sequence.tokens) - 1) // self._pages.page_size
        return self._elsewhere.find(sequence.tokens, sequence.extra_key, len(found), most)

    def begin(self, sequence: Sequence, found: list[int], places: Listed[int]) -> None:
        """Bring what a sequence could begin with, behind the pages that were found for it, which are the transfer's
        now. So many more are free."""
        key = sequence.awaited = page_key(sequence, found, self._pages.page_size)
        transfer = _Transfer(sequence, list(found), {}, key, len(places))
        self.keys.add(key)
        for place in places:
            page = self._pages.allocate(after=transfer.pages[-1] if transfer.pages else None)
            transfer.pages.append(page)
            transfer.places[page] = place
            self._by_page[page] = transfer
            self._unsent.append((place, page))

    def take_unsent(self) -> list[tuple[int, int]]:
        """(place, page) of all that no plan has told yet."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def arrive(self, arrivals: Iterable[TransferEnd]) -> None:
        """Pages have come, or will not."""
        for page, whole in arrivals:
            transfer = self._by_page.pop(page)
            transfer.left -= 1
            if not whole:
                assert self._elsewhere is not None
                transfer.is_whole = False
                self._elsewhere.lose(transfer.places[page])
            if not transfer.left:
                self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        self.keys.discard(transfer.key)
        if self._tree is None or not transfer.is_whole:
            self._pages.release_all(transfer.pages)
            return
        tokens = transfer.sequence.tokens[: len(transfer.pages) * self._pages.page_size]
        self._tree.verify(self._tree.release(tokens, transfer.pages, transfer.sequence.extra_key))


class Prefixes:
    """The scheduler's side of a prefix tree, or of none: then nothing is ever found.

    A page is found once it is resident. What a step fills is in flight, and found by later steps only. They run after
    it, so they read what it has written; within a step there is no such order. `publish` is called when the step that
    was planned last is under way. What comes from elsewhere is in flight until `transfers` are told that it has come.
    """

    def __init__(
        self,
        pages: PageAllocator,
        tree: PrefixTree | None,
        windows: Listed[WindowPages],
        states: States,
        elsewhere: Elsewhere | None,
    ) -> None:
        """windows: which the tree has as attached, as it has the snapshots of `states`. Nothing of these is elsewhere:
        nothing is brought where there are any. elsewhere: None: nothing ever is."""
        self._pages, self._tree, self.windows, self.states = pages, tree, tuple(windows), states
        self.transfers = Transfers(pages, tree, None if windows or states.there_are else elsewhere)
        self._filled: list[tuple[Sequence, int]] = []  # by the step that is being planned, and up to which page
        self._filling: set[PageKey] = set()  # the first page that each of them fills

    @property
    def has_tree(self) -> bool:
        """Whether anything can ever be found."""
        return self._tree is not None

    def publish(self) -> None:
        """Let what the step before fills be found."""
        if self._tree is None or not self._filled:
            return
        for sequence, full in self._filled:
            if sequence.status is Status.RUNNING:
                path = self._tree.insert(sequence.tokens, sequence.pages[:full], sequence.extra_key)
                self._attach(sequence, sequence.pages[:full])
                self.states.attach(sequence, path)
                if sequence.verified:
                    self._tree.verify(sequence.pages[:full])
        self._filled.clear()
        self._filling.clear()

    def uses_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin with cached pages: not if all its prompt has to be computed, to be scored."""
        return self._tree is not None and sequence.request.params.prompt_logprobs is None

    def cached(self, sequence: Sequence) -> int:
        """About how many tokens `match` would find: as many, but for layers that do not keep all."""
        if self._tree is None or not self.uses_cache(sequence):
            return 0
        return self._tree.depth(sequence.tokens, sequence.extra_key) * self._pages.page_size

    def match(self, sequence: Sequence) -> list[int]:
        """The cached pages that a waiting sequence begins with, each now held once more."""
        if self._tree is None or not self.uses_cache(sequence):
            return []
        found = self._tree.match(sequence.tokens, sequence.extra_key)
        for window in self.windows:
            window.hold(found)
        return found

    def release(self, found: list[int]) -> None:
        """Give back what `match` has found."""
        for window in self.windows:
            window.release(found)
        self._pages.release_all(found)

    def next_page(self, sequence: Sequence, found: list[int]) -> PageKey | None:
        """The page that a sequence could begin with behind those that were found; None if there is none."""
        size = self._pages.page_size
        if (len(found) + 1) * size >= len(sequence.tokens) or not self.uses_cache(sequence):
            return None  # a token must be left to compute
        return page_key(sequence, found, size)

    def is_filling(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether the step that is being planned fills more pages that a sequence could begin with than were found."""
        return bool(self._filling) and self.next_page(sequence, found) in self._filling

    def bring(self, sequence: Sequence, found: list[int]) -> bool:
        """Begin to bring what a sequence could begin with behind the pages that were found for it, which are no more
        its own then; False if nothing of it is elsewhere. There is room for all its pages."""
        places = self.transfers.places(sequence, found)
        if not places or not self.uses_cache(sequence):
            return False
        self.evict(max(0, len(places) - self._pages.free))
        self.transfers.begin(sequence, found, places)
        return True

    def fill(self, sequence: Sequence, start: int) -> None:
        """The step that is being planned computes what a sequence has between the tokens `start` and `computed`."""
        if self._tree is None:
            return
        size = self._pages.page_size
        first, full = start // size, sequence.computed // size
        if first < full:
            self._filled.append((sequence, full))
            self._filling.add(page_key(sequence, sequence.pages[:first], size))

    def evict(self, count: int) -> int:
        """Free up to so many pages that only the tree holds; returns how many were freed."""
        return self._tree.evict(count) if self._tree is not None else 0

    def free(self, sequence: Sequence) -> None:
        """Take all pages of a sequence that ends or pauses; those that its draws have verified can be found.

        Steps under way may still write there, but only before any later step reads or writes the pages.
        """
        if self._tree is None:
            self._pages.release_all(sequence.pages)
        else:
            # The newest id came of the last draw, which read all ids before it.
            read = sequence.tokens[:-1] if sequence.verified else []
            kept = self._tree.release(read, sequence.pages, sequence.extra_key)
            self._attach(sequence, kept)
            self.states.attach(sequence, kept)
            self._tree.verify(sequence.pages[: len(read) // self._pages.page_size])
        for window, table in zip(self.windows, sequence.windows, strict=True):
            window.drop(table)
        sequence.windows = ()
        self.states.drop(sequence)

    def verify(self, sequence: Sequence) -> None:
        """A draw has read all tokens of a running sequence and given an id."""
        if self._tree is not None:
            self._tree.verify(sequence.pages[: len(sequence.tokens) // self._pages.page_size])

    def invalidate(self, sequence: Sequence) -> None:
        """A sequence could draw no id: nothing stays cached that only such draws have read."""
        if self._tree is not None:
            self._tree.invalidate(sequence.tokens, sequence.extra_key)

    def clear(self) -> None:
        """Forget everything. The pages of all tokens must be forgotten as well."""
        self._filled.clear()
        self._filling.clear()
        self.transfers.clear()
        for window in self.windows:
            window.clear()
        self.states.clear()
        if self._tree is not None:
            self._tree.clear()

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless pages, their holders and the tree agree. It walks all of them."""
        for sequence in running:
            room = len(sequence.pages) * self._pages.page_size
            assert sequence.computed <= room, f"{sequence}: {room} tokens of pages"
            for table in sequence.windows:
                assert sequence.computed <= len(table.pages) * self._pages.page_size <= room, f"{sequence}: a window"
        held = (page for sequence in running for page in sequence.pages)
        self._pages.check(chain(held, self.transfers.taken), self._tree or ())
        for place, window in enumerate(self.windows):
            window.check([sequence.windows[place] for sequence in running], self._tree or ())
        self.states.check(running)
        if self._tree is not None:
            self._tree.check()

    def _attach(self, sequence: Sequence, path: list[int]) -> None:
        """The tree keeps what a sequence has for those of its pages that the tree has, at their places in `path`."""
        assert self._tree is not None
        for window, table in zip(self.windows, sequence.windows, strict=True):
            for place in range(table.first, len(path)):
                if path[place] in self._tree:
                    window.attach(path[place], table, place)
