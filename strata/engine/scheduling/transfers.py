"""Pages that come from elsewhere: planned once, waited for by whoever begins with them, found by all when there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from strata.cache.elsewhere import Elsewhere
from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import TransferEnd
from strata.engine.request import Sequence

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
