"""Random loads on layers of several kinds, on states, transfers and drafts: no page leaks or is given back too early,
and memory ends with the window."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from strata.cache import window_pages
from strata.cache.snapshots import Marks, Snapshots
from strata.cache.window_pages import WindowPages
from strata.engine.scheduling import states
from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.shelf import Shelf
from tests.engine.scheduling.test_scheduler_properties import Engine, Load, of_loads
from tests.engine.simulated import LONGEST, load, uncrowded


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    """Sequences here have a few tokens, fewer than the blocks of keys that attention reads."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_pages, "KEY_BLOCK", 4)
        patched.setattr(states, "SNAPSHOT_TOKENS", 6)
        yield


def pages_of(window: int, more: int, size: int) -> WindowPages:
    """A few pages more than one sequence needs."""
    return WindowPages(window_pages.page_limit(window, size) + 1 + more // size, size, window)


class WindowLoad(Load):
    """Beside pages of all tokens, or without them, those of one window or two."""

    @initialize(
        given=of_loads(
            windows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=2),
            all_tokens=st.booleans(),
        )
    )
    def start(self, given: dict[str, Any]) -> None:
        self.begin(given, windows=tuple(pages_of(*one, given["page_size"]) for one in given["windows"]))


TestWindowLoad = WindowLoad.TestCase
TestWindowLoad.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


class StateLoad(Load):
    @initialize(
        given=of_loads(window=st.none() | st.integers(1, 20), all_tokens=st.booleans(), snapshots=st.integers(0, 8))
    )
    def start(self, given: dict[str, Any]) -> None:
        size, window = given["page_size"], given["window"]
        windows = () if window is None else (pages_of(window, given["tokens"], size),)
        snapshots = Snapshots(given["slots"] + 1, given["snapshots"], size)
        self.begin(given, windows=windows, snapshots=snapshots)

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


class TransferLoad(Load):
    @initialize(given=of_loads(tokens=st.integers(12, 100), caching=st.just(True)))
    def start(self, given: dict[str, Any]) -> None:
        self.shelf = Shelf(given["page_size"], max(1, given["tokens"] // given["page_size"]))
        self.begin(given, shelf=self.shelf)

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


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pages", [20, 60])
@pytest.mark.parametrize(("window", "rows"), [(None, None), (6, None), (None, 8), (10, 8)])
def test_streams_are_those_of_plain_decoding(window: int | None, rows: int | None, pages: int, ahead: bool) -> None:
    size, slots, source = 4, 6, random.Random(pages)
    kinds = () if window is None else (WindowPages(pages, size, window),)
    snapshots = None if rows is None else Snapshots(slots + 1, rows, size)
    config = SchedulerConfig(slots, 32, LONGEST, draws=4)
    engine = Engine(pages, size, config, True, ahead, kinds, snapshots, right=0.7)
    waiting, sequences = load(120), []
    brought: Counter[int] = Counter()
    while waiting or engine.scheduler.has_work or engine.outstanding is not None:
        for request in [waiting.pop() for _ in range(min(len(waiting), source.randrange(3)))]:
            added = engine.scheduler.add(request)
            engine.device.asked.update((sequence.id, (sequence.index, sequence.extra_key)) for sequence in added)
            sequences += added
        before = {sequence.id: len(sequence.tokens) for sequence in sequences}
        engine.step()
        engine.scheduler.check()
        brought.update(len(sequence.tokens) - before[sequence.id] for sequence in sequences)
        if source.random() < 0.02:
            engine.scheduler.abort(source.choice(sequences).request.id)
    for sequence in sequences:
        outputs, reason, stop = uncrowded(sequence.request, sequence.index, LONGEST)
        found = engine.outputs.get(sequence.id, [])
        if sequence.finish_reason == "abort":
            assert found == outputs[: len(found)]
        else:
            assert (found, sequence.finish_reason, sequence.stop_reason) == (outputs, reason, stop)
    books = [engine.allocator, *(kind.books for kind in kinds)]
    assert all(one.free + one.idle == one.num_pages for one in books), "a page leaked"
    assert snapshots is None or snapshots.free + snapshots.kept == snapshots.count, "a snapshot's row leaked"
    assert min(brought[2], brought[3], brought[4]) > 20, "few drafts were accepted"
