"""A stand-in for a device of which some layers keep a fixed state: it knows of which tokens each row is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from strata.cache.window_pages import WindowPages
from strata.engine.plan import StepPlan
from tests.engine.scheduling.window_device import WindowDevice


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
