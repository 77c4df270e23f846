"""A stand-in for a device of which some layers keep a fixed state: it knows of which tokens each row is."""

from __future__ import annotations

from collections.abc import Sequence

from strata.cache.window_pages import WindowPages
from strata.engine.plan import StepPlan
from tests.engine.scheduling.window_device import WindowDevice


class StateDevice(WindowDevice):
    """states: by row, the salt and the ids that its state has taken up."""

    def __init__(self, page_size: int, windows: Sequence[WindowPages], slots: int) -> None:
        super().__init__(page_size, windows)
        self.slots_there = slots
        self.states: dict[int, tuple[str, tuple[int, ...]]] = {}

    def launch(self, plan: StepPlan) -> list[int]:
        for source, target in plan.states_before:
            assert target < self.slots_there < source, "no snapshot is restored, or not to a slot"
            self.states[target] = self.states[source]
        before = {new.id: new.tokens for new in plan.new} | self.truth
        chunks = {chunk.slot: chunk for chunk in plan.chunks}
        for chunk in plan.chunks:
            salt, truth = self.asked[chunk.sequence][1], tuple(before[chunk.sequence])
            if chunk.start:
                assert self.states[chunk.slot] == (salt, truth[: chunk.start]), "a chunk begins from another state"
            self.states[chunk.slot] = salt, truth[: chunk.start + chunk.count]
        targets = [target for _, target in plan.states_after]
        assert len(set(targets)) == len(targets), "two states are copied to one row"
        for source, target in plan.states_after:
            assert source in chunks, "a state is copied that the step has not computed"
            assert target not in chunks, "a state is copied over one that the step has computed"
            assert target != self.slots_there, "a state is copied to the row of padding"
            self.states[target] = self.states[source]
        return super().launch(plan)
