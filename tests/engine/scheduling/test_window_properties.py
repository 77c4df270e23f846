"""Random loads on layers of several kinds at once: no page leaks or is given back too early, and memory ends with the
window."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from strata.cache import window_pages
from strata.cache.window_pages import WindowPages
from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.test_scheduler_properties import DRAFTING, Engine, Load


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Sequences here are shorter than the blocks of keys that attention reads."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_pages, "KEY_BLOCK", 4)
        yield


class WindowLoad(Load):
    """Beside pages of all tokens, or without them, those of one window or two."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        tokens=st.integers(12, 80),
        windows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=2),
        all_tokens=st.booleans(),
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
        windows: list[tuple[int, int]],
        all_tokens: bool,
        slots: int,
        budget: int,
        caching: bool,
        ahead: bool,
        drafting: tuple[int, float],
    ) -> None:
        self.longest = 48
        config = SchedulerConfig(slots, budget, self.longest, draws=drafting[0])
        pages = max(1, tokens // page_size) if all_tokens else 1000
        kinds = []
        for window, more in windows:
            least = window_pages.most_pages(window, page_size) + 1
            kinds.append(WindowPages(least + more // page_size, page_size, window))
        self.engine = Engine(pages, page_size, config, caching, ahead, tuple(kinds), right=drafting[1])
        self.sequences = []
        self.aborted = set()


TestWindowLoad = WindowLoad.TestCase
TestWindowLoad.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
