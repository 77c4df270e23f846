"""Pages elsewhere, and what brings them to a stand-in for a device, at its leisure and not always."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from strata.engine.plan import TransferEnd
from tests.engine.simulated import Device

_Page = tuple[Hashable, tuple[int, ...]]  # the extra key, and all tokens up to the page's end


class Shelf:
    """Full pages that were put aside, in places behind those of a pool of `first` pages."""

    def __init__(self, page_size: int, first: int) -> None:
        self.page_size, self.next = page_size, first
        self.first = first
        self.pages: dict[int, _Page] = {}
        self.places: dict[_Page, int] = {}

    def put(self, tokens: Sequence[int], extra_key: Hashable) -> None:
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = extra_key, tuple(tokens[:end])
            if page not in self.places:
                self.places[page], self.pages[self.next] = self.next, page
                self.next += 1

    def find(self, tokens: Sequence[int], extra_key: Hashable, first: int, most: int) -> list[int]:
        found: list[int] = []
        for page in range(first, most):
            place = self.places.get((extra_key, tuple(tokens[: (page + 1) * self.page_size])))
            if place is None:
                break
            found.append(place)
        return found

    def lose(self, place: int) -> None:
        del self.places[self.pages.pop(place)]


class Carrier:
    """Brings pages of a shelf. coming: places, by the pages of the pool that their contents come to."""

    def __init__(self, device: Device, shelf: Shelf, lost: float = 0.2) -> None:
        self.device, self.shelf, self.lost = device, shelf, lost
        self.coins = random.Random(shelf.page_size)
        self.coming: dict[int, int] = {}
        device.carrier = self

    def begin(self, place: int, page: int) -> None:
        assert page not in self.coming, "two contents come to one page"
        self.coming[page] = place
        self.device.pages[page] = {}

    def arrive(self, likely: float = 0.5) -> list[TransferEnd]:
        """What has come since this was asked before."""
        arrivals = []
        for page in [page for page in self.coming if self.coins.random() < likely]:
            place = self.coming.pop(page)
            whole = place in self.shelf.pages and self.coins.random() >= self.lost
            if whole:
                (extra_key, tokens), size = self.shelf.pages[place], self.shelf.page_size
                first = len(tokens) - size
                self.device.pages[page] = {at: (tokens[first + at], first + at, extra_key) for at in range(size)}
            arrivals.append(TransferEnd(page, whole))
        return arrivals
