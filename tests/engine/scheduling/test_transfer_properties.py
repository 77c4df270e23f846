"""Random loads of which prefixes come from elsewhere, late, in any order, or not at all: nobody waits for them but who
begins with them, and every stream is the uncrowded one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.shelf import Shelf
from tests.engine.scheduling.test_scheduler_properties import DRAFTING, Engine, Load


class TransferLoad(Load):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        tokens=st.integers(12, 100),
        slots=st.integers(1, 6),
        budget=st.integers(1, 40),
        ahead=st.booleans(),
        drafting=DRAFTING,
    )
    def start(
        self, page_size: int, tokens: int, slots: int, budget: int, ahead: bool, drafting: tuple[int, float]
    ) -> None:
        self.longest = 48
        pages = tokens // page_size
        config = SchedulerConfig(slots, budget, self.longest, draws=drafting[0])
        self.shelf = Shelf(page_size, pages)
        self.engine = Engine(pages, page_size, config, True, ahead, right=drafting[1], shelf=self.shelf)
        self.sequences = []
        self.aborted = set()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 2**16), evict=st.booleans())
    def put_aside(self, which: int, evict: bool) -> None:
        """What a sequence has computed is kept elsewhere as well, or from now on only there."""
        sequence = self.sequences[which % len(self.sequences)]
        if sequence.verified or (sequence.finished and sequence.outputs):
            self.shelf.put(sequence.tokens[:-1], sequence.extra_key)
        if evict and self.engine.prefix is not None:
            self.engine.prefix.evict(len(self.engine.prefix))


TestTransferLoad = TransferLoad.TestCase
TestTransferLoad.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
