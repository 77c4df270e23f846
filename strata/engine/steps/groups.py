"""Where layers keep rows of windows: the pools and block tables that a step has beside those of the first group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool
from strata.cache.tables import GroupTables, Int32Array, StepBuffer, group_mapping
from strata.engine.plan import StepPlan
from strata.engine.program.inputs import StepInputs
from strata.engine.program.program import StepProgram


class WindowSteps:
    """Brings pages of layers with windows into steps.

    The first group is the runner's own. It keeps all tokens, or, if there is no such group, those of the first window:
    then pages of all tokens are numbers, of which steps know nothing.
    """

    def __init__(
        self,
        first: tuple[KVPool, BlockTables],
        others: Sequence[tuple[KVPool, int]],
        only_windows: bool,
        device: torch.device,
    ) -> None:
        """others: the pool and the window of each group behind the first."""
        self.only_windows, self.groups = only_windows, 1 + len(others)
        slots, page_limit = len(first[1].rows) - 1, first[1].rows.shape[1]
        self._others = [(pool, BlockTables(slots, page_limit, device), window) for pool, window in others]
        of_windows = [(pool, tables) for pool, tables, _ in self._others]
        self._windows = [first, *of_windows] if only_windows else of_windows

    def copy_pages(self, plan: StepPlan) -> None:
        """Copy what sequences no longer share, before the step."""
        for group, source, target in plan.window_copies:
            self._windows[group][0].copy_pages([(source, target)])

    def enter_pages(self, plan: StepPlan, captured: bool) -> None:
        """Bring the block tables up to the plan; the page of a single token is entered by a captured step itself."""
        if not plan.windows:
            return
        decodes = {chunk.slot: chunk.start for chunk in plan.chunks if chunk.count == 1} if captured else {}
        for group, slot, first_page, pages in plan.windows:
            pool, tables = self._windows[group]
            entered = decodes[slot] // pool.shape.page_size if slot in decodes else None
            tables.update(slot, first_page, pages, entered)

    def send(self) -> None:
        """Bring the device's side of the other block tables up to the host's."""
        for _, tables, _ in self._others:
            tables.send()

    def place(self, buffer: StepBuffer, slots: Int32Array, starts: Int32Array, counts: Int32Array) -> None:
        """Say where the other groups' rows of a step go."""
        for group, (pool, tables, _) in enumerate(self._others, 1):
            buffer.place_group(group, tables, pool.shape.page_size, slots, starts, counts)

    def tables(self, buffer: StepBuffer, columns: int) -> list[GroupTables]:
        """What the other groups read in a step that is launched eagerly, of tables of so many pages."""
        rows = buffer.tensors["table_rows"]
        return [
            GroupTables(pool, torch.index_select(tables.on_device[:, :columns], 0, rows), (window,))
            for pool, tables, window in self._others
        ]

    def captured_tables(self, buffer: StepBuffer, inputs: StepInputs, program: StepProgram) -> list[GroupTables]:
        """The same in a step that is captured, whose tables have all pages. inputs: of the first group."""
        found = []
        for group, (pool, tables, window) in enumerate(self._others, 1):
            own = inputs._replace(tables=tables.on_device, slot_mapping=buffer.tensors[group_mapping(group)])
            gathered: Tensor = program.captured_inputs.forward(own)[1]
            found.append(GroupTables(pool, gathered, (window,)))
        return found
