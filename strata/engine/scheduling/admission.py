"""Which pages a sequence begins with, and whether it must wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal

from strata.cache.pages import PageAllocator
from strata.engine.request import Sequence
from strata.engine.scheduling.growth import Windows
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.queues import Queues
from strata.engine.scheduling.room import InLine


class Admission:
    """Finds and takes the pages of those that are to run."""

    def __init__(self, pages: PageAllocator, prefixes: Prefixes, queues: Queues, windows: Windows | None) -> None:
        self._pages, self._prefixes, self._queues, self._windows = pages, prefixes, queues, windows
        self._coming = prefixes.transfers.keys
        self._refusal: tuple[Sequence, int, tuple[int, ...]] | None = None

    def clear(self) -> None:
        """Forget who was refused, and when."""
        self._refusal = None

    @property
    def stays_refused(self) -> bool:
        """Whether the first that waits was refused for want of pages and will be as long as those that run only grow.
        With a prefix tree it is looked for anew, which counts as a use of what is found."""
        if self._refusal is None or self._prefixes.has_tree or not self._queues.waiting:
            return False
        sequence, room, _ = self._refusal
        has_no_more = self._pages.free + self._pages.idle - len(self._queues.running) <= room
        return has_no_more and sequence is self._queues.waiting[0]

    def find(self, sequence: Sequence, reserved: int) -> list[int] | Literal["loading"] | None:
        """The cached pages that a waiting sequence begins with, now its own; None if it must wait for others to end, or
        "loading" for pages that come from elsewhere, from now on if not already. reserved: pages that it has to leave
        to others."""
        if sequence.awaited in self._coming:
            return "loading"
        # A page is left for each running sequence: what is admitted must not be preempted at once.
        reserved += len(self._queues.running)
        room = self._pages.free + self._pages.idle - reserved
        refusal = sequence, room, () if self._windows is None else self._windows.room
        # An id that is under way (the sequence was preempted just now) is on the device in its former slot only.
        if sequence.pending or self._refusal == refusal:
            return None
        found = self._prefixes.match(sequence)
        if self._coming and (next_page := self._prefixes.next_page(sequence, found)) in self._coming:
            self._prefixes.release(found)
            sequence.awaited = next_page
            return "loading"
        lacks = self.wanted(sequence, found) > self._pages.free + self._pages.idle - reserved
        if lacks or (self._windows is not None and self._windows.lack(self.wanted(sequence, found), found, reserved)):
            self._prefixes.release(found)
            self._refusal = refusal
            return None
        self._refusal = None
        return "loading" if self._prefixes.bring(sequence, found) else found

    def in_line(self, prefilling: list[Sequence], now: float) -> Iterator[InLine]:
        """Whose prompts nothing but other prompts holds up: those that run, and those that could. now: seconds, by the
        clock of `Scheduler.schedule`."""
        for sequence in chain(prefilling, self._able()):
            if sequence.in_line is None:
                sequence.in_line, sequence.cached = now, self._prefixes.cached(sequence)
            known = sequence.computed if sequence.pages else sequence.cached
            yield InLine(known, len(sequence.tokens) - known, now - sequence.in_line)

    def _able(self) -> Iterator[Sequence]:
        """Those that wait and find slots and pages, even if none is cached. The others wait for those that run to end,
        however many tokens of prompts a step takes."""
        room = self._pages.free + self._pages.idle - len(self._queues.running)
        for sequence in self._queues.waiting[: self._queues.free_slots]:
            wanted = self._pages.pages_for(len(sequence.tokens))
            if wanted > room:
                return
            room -= wanted + 1  # the one that is left for each that runs
            yield sequence

    def wanted(self, sequence: Sequence, found: list[int]) -> int:
        """How many pages a sequence needs behind those that were found for it."""
        return self._pages.pages_for(len(sequence.tokens)) - len(found)

    def take(self, sequence: Sequence, found: list[int]) -> list[int]:
        """All pages of what a sequence has to prefill, behind those that were found for it."""
        wanted, pages = self.wanted(sequence, found), list(found)
        self._prefixes.evict(max(0, wanted - self._pages.free))
        for _ in range(wanted):
            pages.append(self._pages.allocate(after=pages[-1] if pages else None))
        return pages
