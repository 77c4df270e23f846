"""Random loads on layers that keep fixed states, beside pages of all tokens, windows, or nothing: every chunk begins
from the state of all tokens before it, and no row of a snapshot leaks or has two owners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from strata.cache import window_pages
from strata.cache.snapshots import Marks, Snapshots
from strata.cache.window_pages import WindowPages
from strata.engine.scheduling import states
from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.test_scheduler_properties import DRAFTING, Engine, Load


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    """Sequences here have a few tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_pages, "KEY_BLOCK", 4)
        patched.setattr(states, "SNAPSHOT_TOKENS", 6)
        yield


class StateLoad(Load):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        tokens=st.integers(12, 80),
        window=st.none() | st.integers(1, 20),
        all_tokens=st.booleans(),
        snapshots=st.integers(0, 8),
        slots=st.integers(1, 6),
        budget=st.integers(1, 40),
        caching=st.booleans(),
        ahead=st.booleans(),
        drafting=DRAFTING,
    )
    def start(
        self,
        page_size: int,
        tokens: int,
        window: int | None,
        all_tokens: bool,
        snapshots: int,
        slots: int,
        budget: int,
        caching: bool,
        ahead: bool,
        drafting: tuple[int, float],
    ) -> None:
        self.longest = 48
        config = SchedulerConfig(slots, budget, self.longest, draws=drafting[0])
        pages = max(1, tokens // page_size) if all_tokens else 1000
        kinds: tuple[WindowPages, ...] = ()
        if window is not None:
            least = window_pages.most_pages(window, page_size) + 1
            kinds = (WindowPages(least + tokens // page_size, page_size, window),)
        rows = Snapshots(slots + 1, snapshots, page_size)
        self.engine = Engine(pages, page_size, config, caching, ahead, kinds, rows, right=drafting[1])
        self.sequences = []
        self.aborted = set()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine") and self.engine.snapshots is not None:
            rows = self.engine.snapshots
            assert rows.free + rows.kept == rows.count, "a snapshot's row leaked"


TestStateLoad = StateLoad.TestCase
TestStateLoad.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_snapshot_that_was_used_longest_ago_makes_room() -> None:
    rows = Snapshots(first=5, count=2, page_size=4)
    for page in (10, 11):
        rows.attach(page, Marks(row=rows.take()))
    assert rows.covered([9, 10, 11], 3) == 3
    assert rows.covered([9, 10, 11], 2) == 2
    used = rows.row(10)
    own = Marks(row=rows.take())
    assert rows.covered([9, 10, 11], 3) == 2, "page 11 was used longest ago"
    assert own.row != used
    assert {own.row, used} == {5, 6}
    rows.attach(10, own)
    assert (own.row, rows.free, rows.row(10)) == (None, 1, used), "the tree keeps what it has"
    rows.check([], [10])
    with pytest.raises(AssertionError, match="lost or held twice"):
        rows.check([Marks(row=used)], [10])
