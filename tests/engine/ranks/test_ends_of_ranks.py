"""Layouts of two and four ranks answer as one rank does, and end together."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from strata import LLM
from strata.engine.faults import EngineFault
from tests.engine.ranks.layouts import (
    LONG_LAYOUTS,
    SHORT_LAYOUTS,
    Layout,
    assert_alike,
    assert_same_ids,
    greedy,
    prompt,
)


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, id=name) for name, layout in SHORT_LAYOUTS.items()),
        *(pytest.param(layout, id=name, marks=pytest.mark.long) for name, layout in LONG_LAYOUTS.items()),
    ],
)
def test_ranks_answer_as_one_and_one_that_is_killed_is_named(layout: Layout, tmp_path: Path) -> None:
    options = layout.options(tmp_path)
    one, several = LLM(**options), layout.over_ranks(options)
    # The last one is the first and more: it is found at the end of what they share.
    for prompts in ([prompt(130), prompt(5, 3), prompt(61, 11)], [prompt(130) + prompt(20, 13)]):
        assert_alike(one, several, prompts, greedy(12))
    assert several.engine.loop.scheduler.statistics.prefix_hits >= 48
    if one.engine.ledger.states:
        assert 0.4 < several.engine.ledger.states / one.engine.ledger.states < 0.7
    assert_same_ids(several)
    assert several.engine.ranks is not None
    others = several.engine.ranks.processes
    count, killed = len(others) + 1, max(others)
    assert list(others) == [*range(1, count)]
    threading.Timer(0.1, os.kill, (others[killed], signal.SIGKILL)).start()
    cause = rf"rank {killed} of {count} \((stage 1, )?{re.escape(f'process {others[killed]}')}\) was killed by SIGKILL"
    with pytest.raises(EngineFault, match=cause):
        several.generate([prompt(130), prompt(5, 3), prompt(61, 11)] * 20, greedy(64), use_tqdm=False)
    assert not any(Path(f"/proc/{pid}").exists() for pid in others.values())
