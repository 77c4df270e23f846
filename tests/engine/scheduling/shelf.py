"""Pages elsewhere, and what brings them to a stand-in for a device, at its leisure and not always; and devices of
which some layers see a window or keep a fixed state."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from strata.cache.window_pages import WindowPages
from strata.engine.plan import Chunk, StepPlan, TransferEnd
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


_Row = tuple[int, int, Hashable]  # id, position, extra key


class WindowDevice(Device):
    """windows: the pages of each group, of which it knows sizes alone."""

    def __init__(self, page_size: int, windows: Sequence[WindowPages], right: float = 0.5) -> None:
        super().__init__(page_size, right)
        self.windows = tuple(windows)
        self.tables_of: list[dict[int, dict[int, int]]] = [{} for _ in windows]
        self.pages_of: list[dict[int, dict[int, _Row]]] = [{} for _ in windows]

    def look(self, plan: StepPlan) -> None:
        for group, source, target in plan.window_copies:
            self.pages_of[group][target] = dict(self.pages_of[group][source])
        for new in plan.new:
            for tables in self.tables_of:
                tables[new.slot] = {}
        for entries in plan.windows:
            table = self.tables_of[entries.group][entries.slot]
            table.update(enumerate(entries.new_pages, entries.first_page))
        for group in range(len(self.windows)):
            rows = {chunk.slot: self._rows(chunk) for chunk in plan.chunks}
            self._write_window(plan, group, rows)
            for chunk in plan.chunks:
                self._read(chunk, group, rows[chunk.slot])
        super().look(plan)

    def _rows(self, chunk: Chunk) -> list[_Row]:
        extra_key = self.asked[chunk.sequence][1]
        return [(token, position, extra_key) for position, token in enumerate(self.runs[chunk.slot].tokens)]

    def _write_window(self, plan: StepPlan, group: int, rows: dict[int, list[_Row]]) -> None:
        written: set[tuple[int, int]] = set()
        self.writers = {}
        for chunk in plan.chunks:
            for position in range(self.runs[chunk.slot].start, len(rows[chunk.slot])):
                place = self._place(group, chunk.slot, position)
                assert place not in written, "two tokens in one place of a window"
                written.add(place)
                self.pages_of[group].setdefault(place[0], {})[place[1]] = rows[chunk.slot][position]
                assert self.writers.setdefault(place[0], chunk.slot) == chunk.slot, "two chunks write in a page"

    def _read(self, chunk: Chunk, group: int, rows: list[_Row]) -> None:
        start = self.runs[chunk.slot].start
        for position in range(max(0, start + 1 - self.windows[group].window), len(rows)):
            page, offset = self._place(group, chunk.slot, position)
            assert self.writers.get(page, chunk.slot) == chunk.slot, "a chunk reads what another of its step writes"
            assert self.pages_of[group][page][offset] == rows[position], "a window was given back too early"

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        return self.tables_of[group][slot][position // self.page_size], position % self.page_size


class StateDevice(WindowDevice):
    """states: by row, the extra key and the ids that its state has taken up."""

    def __init__(self, page_size: int, windows: Sequence[WindowPages], slots: int, right: float = 0.5) -> None:
        super().__init__(page_size, windows, right)
        self.slots_there = slots
        self.states: dict[int, tuple[Hashable, tuple[int, ...]]] = {}

    def look(self, plan: StepPlan) -> None:
        for source, target in plan.states_before:
            assert min(source, target) < self.slots_there < max(source, target), "neither to a snapshot nor from one"
            self.states[target] = self.states[source]
        chunks = {chunk.slot: chunk for chunk in plan.chunks}
        for chunk in plan.chunks:
            extra_key, run = self.asked[chunk.sequence][1], self.runs[chunk.slot]
            if run.start:
                before = extra_key, tuple(run.tokens[: run.start])
                assert self.states[chunk.slot] == before, "a chunk begins from another state"
            self.states[chunk.slot] = extra_key, tuple(run.tokens)
        targets = [target for _, target in plan.states_after]
        assert len(set(targets)) == len(targets), "two states are copied to one row"
        for source, target in plan.states_after:
            assert source in chunks, "a state is copied that the step has not computed"
            assert target not in chunks, "a state is copied over one that the step has computed"
            assert target != self.slots_there, "a state is copied to the row of padding"
            self.states[target] = self.states[source]
        super().look(plan)
