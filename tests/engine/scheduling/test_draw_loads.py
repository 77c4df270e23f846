"""Long loads of drafts on layers of all kinds, on pools that are full: every stream is that of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from strata.cache import window_pages
from strata.cache.snapshots import Snapshots
from strata.cache.window_pages import WindowPages
from strata.engine.scheduling import states
from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.test_scheduler_properties import Engine
from tests.engine.simulated import LONGEST, load, uncrowded


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    """Sequences here have a few tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_pages, "KEY_BLOCK", 4)
        patched.setattr(states, "SNAPSHOT_TOKENS", 12)
        yield


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
