"""Which rank is blamed for a run that stands still, from notes and in live runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata.comm.observer import CollectiveCall
from strata.train.faults.config import FaultsConfig
from strata.train.faults.hang import HUNG
from strata.train.faults.hang_diagnosis import Heartbeat, diagnose
from tests.train.fault_ranks import HANG_SECONDS

SHARD = (0, 1, 2, 3)
NOW = 1000.0


def calls(axis: str, ranks: tuple[int, ...], count: int) -> tuple[CollectiveCall, ...]:
    return tuple(
        CollectiveCall("all_gather" if number % 2 else "reduce_scatter", axis, ranks, number, 64)
        for number in range(1, count + 1)
    )


def beat(
    rank: int, step: int, phase: str, *lines: tuple[CollectiveCall, ...], waits: CollectiveCall | None = None
) -> Heartbeat:
    last = tuple(line[-1] for line in lines if line)
    recent = tuple(call for line in lines for call in line)
    return Heartbeat(rank, step, phase, 2.0, NOW, True, waits, last, recent)


def test_the_rank_that_never_entered_a_collective_is_blamed() -> None:
    entered = calls("shard", SHARD, 8)
    beats = [beat(rank, 41, "reduce", entered, waits=entered[7]) for rank in SHARD]
    beats[3] = beat(3, 41, "backward", entered[:7])
    assert diagnose(beats, NOW, 1.0) == (
        "rank 3 is at step 41, backward, and never entered reduce_scatter 8 of 'shard' (64 bytes) "
        "that ranks 0-2 wait in"
    )


def test_of_two_axes_the_rank_that_waits_for_nobody_is_blamed() -> None:
    """Rank 3 stops; rank 2 waits for it along tp, and so never comes to where 0 and 1 wait along dp."""
    first, second = calls("tp", (2, 3), 5), calls("tp", (0, 1), 6)
    along = {0: calls("dp", (0, 2), 2), 1: calls("dp", (1, 3), 2)}
    beats = [
        beat(0, 7, "reduce", second, along[0], waits=along[0][1]),
        beat(1, 7, "reduce", second, along[1], waits=along[1][1]),
        beat(2, 7, "forward", first, along[0][:1], waits=first[4]),
        beat(3, 7, "forward", first[:4], along[1][:1]),
    ]
    assert diagnose(beats, NOW, 1.0).startswith("rank 3 is at step 7, forward, and never entered ")


def test_ranks_that_are_no_longer_heard_of_are_blamed() -> None:
    entered = calls("shard", SHARD, 2)
    beats: list[Heartbeat | None] = [beat(rank, 3, "reduce", entered, waits=entered[1]) for rank in SHARD]
    beats[1] = replace(beat(1, 3, "data", entered[:1]), hangs=False, time=NOW - 7)
    assert diagnose(beats, NOW, 1.0) == (
        "rank 1 last wrote a heartbeat 7 s ago, at step 3, data: frozen, or its machine is out of reach; "
        "ranks 0, 2-3 wait in reduce_scatter 2 of 'shard' (64 bytes)"
    )
    beats[1] = None
    assert diagnose(beats, NOW, 1.0).startswith("rank 1 never wrote a heartbeat; ranks 0, 2-3 wait in ")


def test_without_a_missing_collective_the_rank_in_none_or_behind_is_blamed() -> None:
    entered = calls("shard", (0, 1), 3)
    waiting = beat(0, 9, "update", entered, waits=entered[2])
    assert diagnose([waiting, beat(1, 9, "checkpoint", entered)], NOW, 1.0) == (
        "rank 1 is at step 9, checkpoint, in no collective; rank 0 waits in all_gather 3 of 'shard' (64 bytes)"
    )
    assert diagnose([beat(0, 9, "data"), beat(1, 8, "log")], NOW, 1.0) == (
        "rank 1 is at step 8, log; the others are at step 9"
    )
    assert diagnose([beat(rank, 9, "update", entered) for rank in (0, 1)], NOW, 1.0) == (
        "ranks 0-1 are at step 9, update, and all have entered the same collectives, up to all_gather 3 of 'shard' "
        "(64 bytes): if no rank computes, a device or the network stands still"
    )


def test_heartbeats_are_json() -> None:
    entered = calls("shard", SHARD, 3)
    for one in (beat(1, 2, "data"), beat(1, 2, "reduce", entered, waits=entered[2])):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Heartbeat) == one


def run(name: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of three ranks."""
    command = [sys.executable, "-m", "tests.train.fault_ranks", "launch", "3", "0", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def pause_of(folder: Path) -> float:
    """Seconds from the last progress of any rank to the report."""
    report = json.loads(next(folder.glob("hang-*.json")).read_text())
    return report["time"] - max(one["time"] - one["seconds"] for one in report["ranks"])


def test_a_rank_that_stops_in_a_backward_pass_is_named_with_its_collective(tmp_path: Path) -> None:
    code, said = run("sleeps", tmp_path)
    assert code == HUNG
    (line,) = [line for line in said.splitlines() if "no progress" in line]
    assert line.startswith(
        f"strata: no progress for {HANG_SECONDS:g} s: rank 1 is at step 5, backward, and never entered reduce_scatter "
    ), said
    assert "of 'shard'" in line
    assert "that ranks 0, 2 wait in" in line
    assert f"failed with exit code {HUNG}" in said
    folder = tmp_path / "faults"
    assert HANG_SECONDS <= pause_of(folder) < 1.5 * HANG_SECONDS
    assert "in stop" in (folder / "rank-001.txt").read_text()  # the function that sleeps
    assert "in wait" in (folder / "rank-000.txt").read_text()
    for rank in range(3):
        noted = msgspec.json.decode((folder / f"rank-{rank:03}.json").read_bytes(), type=Heartbeat)
        assert (noted.rank, noted.step, noted.hangs) == (rank, 5, True)


def test_a_frozen_rank_is_named_by_one_that_lives(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, said = run("freezes", tmp_path)
    assert code == HUNG
    (line,) = [line for line in said.splitlines() if "no progress" in line]
    assert "rank 0 last wrote a heartbeat" in line
    assert "at step 3, data: frozen" in line
    assert "ranks 1-2 wait in all_reduce 3 of 'dp' (16 bytes)" in line
    assert time.monotonic() - begun < 200  # in which three ranks import torch


@pytest.mark.parametrize("seconds", [0.5, -1.0])
def test_a_time_too_short_to_tell_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"faults.hang_seconds = {seconds} must be at least 1, or 0"):
        FaultsConfig(hang_seconds=seconds)
