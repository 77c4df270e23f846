"""Slow ranks, from what the ranks measured and in a live run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.train.faults.config import FaultsConfig
from strata.train.faults.hang import HangWatch
from strata.train.faults.stragglers import ComputeClock, Stragglers
from tests.parallel.ranks import run_ranks

CONFIG = FaultsConfig(straggler_share=0.1, straggler_intervals=2)


def test_a_rank_is_slow_after_several_intervals_in_a_row() -> None:
    stragglers = Stragglers(CONFIG, Axis("dp", 4, 0, (0, 1, 2, 3), None))
    first = stragglers.judge([1.0, 1.0, 1.3, 1.05], 2.0)
    assert (first.rank, first.seconds, first.median, first.slow, first.line) == (2, 1.3, 1.025, (), "")
    assert first.share == pytest.approx(0.275 / 2)
    second = stragglers.judge([1.0, 1.0, 1.2, 1.0], 2.0)
    assert second.slow == (2,)
    assert second.line == "slower than the median of 1000.0 ms a step for 2 intervals: rank 2 1200.0 ms (+20%)"
    assert stragglers.judge([1.0, 1.0, 1.0, 1.0], 2.0).slow == ()
    assert stragglers.judge([1.0, 1.0, 1.2, 1.0], 2.0).slow == ()


def test_one_process_is_never_slow() -> None:
    alone = Stragglers(CONFIG, Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("dp"))
    assert [alone.report([2.0, 3.0, 9.0], 9.0).slow for _ in range(4)] == [()] * 4


def test_what_is_recorded_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA answers no question about an event that was recorded into a graph."""

    class Event:
        def __init__(self, **_: object) -> None:
            assert not torch.cuda.is_current_stream_capturing()

        def record(self) -> None: ...
        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 2000.0

    clock = ComputeClock(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=captures: now)
        clock.begin()
        clock.end()
    assert clock.take() == [2.0]


def three(world: World, folder: Path) -> dict[str, Any]:
    """Rank 1 computes longer in two intervals of three steps; and what a watch counts of the exchanges."""
    with HangWatch(world, folder / "faults", 60.0) as watch:
        axis = Mesh.of(watch.world, {"dp": world.size}).axis("dp")
        clock, stragglers = ComputeClock(world.device), Stragglers(CONFIG, axis)
        lines = []
        for interval in range(2):
            for step in range(3):
                watch.at(3 * interval + step + 1, "forward")
                clock.begin()
                time.sleep(0.24 if world.rank == 1 else 0.06)
                clock.end()
            found = stragglers.report(clock.take(), 0.2)
            lines.append([found.rank, list(found.slow), found.line])
        call = watch.started("all_gather", axis.name, axis.ranks, 8)
        return {"lines": lines, "left": clock.take(), "next": [call.axis, call.number]}


def test_ranks_exchange_what_they_measured(tmp_path: Path) -> None:
    ranks = run_ranks(three, 3, tmp_path)
    for one in ranks:
        assert one == ranks[0]
        (slowest, none, _), (_, slow, line) = one["lines"]
        assert (slowest, none, slow) == (1, [], [1])
        assert re.search(r": rank 1 \d+\.\d ms \(\+\d+%\)$", line), line  # a sleep may take longer
        assert one["left"] == []
        assert one["next"] == ["dp", 3]
    assert not (tmp_path / "faults" / "reporting").exists()
