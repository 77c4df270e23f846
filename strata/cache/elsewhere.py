"""Pages that are not in the device's pool: in the host's memory, on a disk, or with another engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class Elsewhere(Protocol):
    """Keeps the contents of full pages in places of its own. A place has a number that no page of the pool has; a plan
    that brings its contents into the pool names it as what a page is copied from."""

    def find(self, tokens: Sequence[int], extra_key: Hashable, first: int, most: int) -> Sequence[int]:
        """The places of full pages that `tokens` begin with: of the pages `first`, `first` + 1 and so on, without a
        gap, and none from `most` on. extra_key: as in `PrefixTree`."""

    def lose(self, place: int) -> None:
        """Its contents could not be brought: it is not found again."""
