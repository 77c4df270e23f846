"""A stand-in for a device of which some layers see a window: it knows what each of their pages holds, too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from strata.cache.window_pages import WindowPages
from strata.engine.plan import Chunk, StepPlan
from tests.engine.simulated import Device

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
