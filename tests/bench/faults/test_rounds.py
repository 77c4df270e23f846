"""Rounds of faults: what counts as wrong, which process is whose, how requests are counted, and two rounds for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from benchmarks.faults import rounds
from benchmarks.faults.processes import Process, descendants, engine_of, is_there
from benchmarks.faults.rounds import FaultRound, hit
from benchmarks.faults.server import served
from benchmarks.faults.steady_load import Endings, SteadyLoad
from strata.bench.load.connection import HttpClient
from strata.bench.load.request_sets import Ask, encode
from strata.cli.main import app
from strata.hardware.gpu_memory import GpuMemory
from tests.cli.fake_server import FakeServer

GOOD = FaultRound(1, 0, "SIGKILL", 0.3, 12.0, "the engine is gone", 30, 90, 0, 16, 0, 5 << 20)


@pytest.mark.long
def test_two_ranks_of_a_server_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    saved = tmp_path / "faults.jsonl"
    options = ["--rounds", "2", "--model", "builtin", "--dtype", "float32", "--device", "cpu", "--request-rate", "6"]
    done = CliRunner().invoke(app, ["bench", "faults", *options, "--save", str(saved)])
    assert done.exit_code == 0, done.output
    *found, summary = (json.loads(line) for line in saved.read_text().splitlines())
    hits = [(one["test"], one["rank"], one["signal"]) for one in found]
    assert hits == [("fault", 0, "SIGKILL"), ("fault", 1, "SIGKILL")]
    for one in found:
        assert 0 < one["noticed"] < one["ready"]
        assert one["failed"] > 0  # those under way, and those that came meanwhile
        assert 0 < one["answered_after"] <= one["answered"]
        assert (one["lost"], one["processes_left"]) == (0, 0)
    assert "rank 1 of 2 (process " in found[1]["fault"]
    assert "was killed by SIGKILL" in found[1]["fault"]
    assert (summary["test"], summary["rounds"], summary["wrong"], summary["exit_code"]) == ("faults", 2, [], 0)
    assert summary["answered"] == sum(one["answered"] for one in found)


def test_every_rank_is_killed_then_every_rank_is_stopped() -> None:
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    assert [hit(number, 2) for number in range(5)] == [(0, kill), (1, kill), (0, stop), (1, stop), (0, kill)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"memory_left": None}, []),
        ({"noticed": None, "ready": None}, ["the fault was not noticed"]),
        ({"ready": None, "answered_after": 0}, ["the server was not ready again after 180 s"]),
        ({"answered_after": 0}, ["no request was answered once the server was ready again"]),
        (
            {"lost": 2, "processes_left": 1, "memory_left": 1 << 30},
            ["2 requests lost", "1 process left", "1.00 GiB of a GPU's memory were left"],
        ),
    ],
)
def test_what_must_not_be_is_named(change: dict[str, object], said: list[str]) -> None:
    assert list(replace(GOOD, **change).faults()) == said  # type: ignore[arg-type]


def test_requests_are_answered_or_failed_or_lost() -> None:
    async def load(url: str) -> Endings:
        client = HttpClient(url)
        try:
            sending = SteadyLoad(client, [encode(Ask([1, 2], 3), "fake")], rate=50, timeout=2.0)
            while sending.answered < 4:
                await asyncio.sleep(0.01)
            return await sending.end()
        finally:
            client.close()

    with FakeServer({1: "error", 2: "cut", 4: "hangs", 5: "429"}) as fake:
        found = asyncio.run(load(fake.url))
        assert found.answered + found.failed + found.lost == len(fake.bodies)
        assert (found.failed, found.lost) == (2, 2)
        assert found.said


def test_processes_are_told_apart_by_when_they_started() -> None:
    code = "import subprocess, sys; one = subprocess.Popen(['sleep', '60']); print(one.pid, flush=True); one.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            (below,) = descendants(process.pid)
            assert below.pid == child
            assert below in descendants(os.getpid())
            assert is_there(below)
            assert not is_there(Process(below.started + 1, child))  # a later one of the same number
            assert engine_of(process.pid) is None
            os.kill(child, signal.SIGKILL)
        finally:
            process.kill()
    assert below not in descendants(os.getpid())


def test_memory_that_is_left_is_of_the_gpu_with_the_most() -> None:
    assert rounds._above([5, 9], [4, 2]) == 7
    assert rounds._above([1, 2], [4, 2]) == 0
    assert rounds._above([], []) is None
    readings = iter([[GpuMemory(10, 9), GpuMemory(10, 8)], [GpuMemory(10, 4), GpuMemory(10, 9)]])
    watched = rounds._LeastMemory(cast(Any, SimpleNamespace(read=lambda: next(readings))), [1, 7])
    assert watched.left is None
    watched.look()
    watched.look()
    assert watched.left == 3


def test_a_server_that_does_not_start_is_told_with_its_own_words() -> None:
    with (
        pytest.raises(ValueError, match=r"ended with exit code 1: strata: error: .*no-such-model"),
        served(["/no-such-model"]),
    ):
        pytest.fail("served")
