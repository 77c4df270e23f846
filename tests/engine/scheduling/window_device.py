"""A stand-in for a device of which some layers see a window: it knows what each of their pages holds, too."""

from __future__ import annotations

from collections.abc import Sequence

from strata.cache.window_pages import WindowPages
from strata.engine.plan import Chunk, StepPlan
from tests.engine.simulated import Device

_Row = tuple[int, int, str]  # id, position, salt


class WindowDevice(Device):
    """windows: the pages of each group, of which it knows sizes alone."""

    def __init__(self, page_size: int, windows: Sequence[WindowPages]) -> None:
        super().__init__(page_size)
        self.windows = tuple(windows)
        self.tables_of: list[dict[int, dict[int, int]]] = [{} for _ in windows]
        self.pages_of: list[dict[int, dict[int, _Row]]] = [{} for _ in windows]

    def launch(self, plan: StepPlan) -> list[int]:
        for group, source, target in plan.window_copies:
            self.pages_of[group][target] = dict(self.pages_of[group][source])
        for new in plan.new:
            for tables in self.tables_of:
                tables[new.slot] = {}
        for entries in plan.windows:
            table = self.tables_of[entries.group][entries.slot]
            table.update(enumerate(entries.new_pages, entries.first_page))
        for group in range(len(self.windows)):
            before = {new.id: new.tokens for new in plan.new} | self.truth
            rows = {chunk.slot: self._rows(chunk, before[chunk.sequence]) for chunk in plan.chunks}
            self._write(plan, group, rows)
            for chunk in plan.chunks:
                self._read(chunk, group, rows[chunk.slot])
        return super().launch(plan)

    def _rows(self, chunk: Chunk, truth: Sequence[int]) -> list[_Row]:
        salt = self.asked[chunk.sequence][1]
        return [(truth[position], position, salt) for position in range(chunk.start + chunk.count)]

    def _write(self, plan: StepPlan, group: int, rows: dict[int, list[_Row]]) -> None:
        written: set[tuple[int, int]] = set()
        self.writers: dict[int, int] = {}
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                place = self._place(group, chunk.slot, position)
                assert place not in written, "two tokens in one place of a window"
                written.add(place)
                self.pages_of[group].setdefault(place[0], {})[place[1]] = rows[chunk.slot][position]
                assert self.writers.setdefault(place[0], chunk.slot) == chunk.slot, "two chunks write in a page"

    def _read(self, chunk: Chunk, group: int, rows: list[_Row]) -> None:
        for position in range(max(0, chunk.start + 1 - self.windows[group].window), chunk.start + chunk.count):
            page, offset = self._place(group, chunk.slot, position)
            assert self.writers.get(page, chunk.slot) == chunk.slot, "a chunk reads what another of its step writes"
            assert self.pages_of[group][page][offset] == rows[position], "a window was given back too early"

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        return self.tables_of[group][slot][position // self.page_size], position % self.page_size
