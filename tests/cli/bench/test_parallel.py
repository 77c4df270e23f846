"""`strata bench parallel` and `comm`: a line as each measurement ends or fails, and the next call goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.parallel import measure as measuring
from benchmarks.parallel.measure import run_limited
from benchmarks.parallel.plan import BenchMachine
from benchmarks.parallel.record import read
from strata.bench.comm.measure import CommResult
from strata.cli.bench.comm import parse_sizes
from strata.cli.main import app
from tests.serve.running import is_alive


def bench(saved: Path, *more: str) -> Result:
    options = ["--models", "builtin", "--dtype", "float32", "--device", "cpu", "--save", str(saved)]
    return CliRunner().invoke(app, ["bench", "parallel", *options, *more])


def test_one_and_two_ranks_of_the_built_in_model(tmp_path: Path) -> None:
    saved = tmp_path / "found.jsonl"
    done = bench(saved, "--tests", "T0")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [(one["test"], one["ranks"], one["fault"]) for one in lines] == [("T0", 1, None), ("T0", 2, None)]
    assert [one["results"][0]["test"] for one in lines] == ["T0", "T0-tp2"]
    assert all(0 < one["results"][0]["value"] <= one["seconds"] for one in lines)
    assert "times one rank" in done.output
    again = bench(saved, "--tests", "T0")
    # Lines are broken where a long folder needs it.
    assert "".join(f"{saved} has 2 of 2 measurements".split()) in "".join(again.output.split())
    assert len(saved.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("memory: 8 GiB\nstrata: error: the KV pool would hold 9 tokens\n  weights 3 GiB\n  margin 0 GiB\n",
         "the KV pool would hold 9 tokens"),
        ("strata: error: rank 1 has ended\nstrata: error: no room\n  margin 0 GiB\n", "no room"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        ("", ""),
    ],
)  # fmt: skip
def test_of_what_failed_the_error_is_quoted(said: str, told: str) -> None:
    """And not the last line of what stands behind it, such as how memory was divided."""
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(3)"
    assert run_limited([sys.executable, "-c", code], 60) == f"exit code 3: {told}"


def test_a_call_goes_on_where_another_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is interrupted while it measures two ranks; T2 on one rank has failed before that."""
    asked: list[str] = []
    answers: list[Any] = [[{"value": 4.0, "unit": "s", "floor": None}], "exit code 1: a reason", KeyboardInterrupt()]

    def run(command: list[str], limit: float) -> Any:
        asked.append(" ".join(command[4:8]))
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(measuring, "run_limited", run)
    saved = tmp_path / "found.jsonl"
    assert bench(saved, "--tests", "T0,T2").exit_code != 0
    assert [one.fault for one in read(saved)] == [None, "exit code 1: a reason"]
    with saved.open("a") as file:
        file.write('{"test": "T0", "mod')  # and a line that was cut
    assert len(read(saved)) == 2
    asked.clear()
    answers += [[{"value": value, "unit": "ms", "floor": value / 2}] for value in (12.0, 2.0, 8.0)]
    done = bench(saved, "--tests", "T0,T2")
    assert done.exit_code == 0, done.output
    rest = "--model builtin --tensor-parallel-size"
    assert asked == [f"{name} {rest}" for name in ("latency", "startup", "latency")]
    rows = [line.replace("│", " ").split() for line in done.output.splitlines() if "│ builtin" in line]
    assert rows == [
        ["builtin", "T0", "1", "4", "s", "1.00", "-", "-"],
        ["builtin", "T2", "1", "12", "ms", "1.00", "6", "50%"],
        ["builtin", "T0", "2", "2", "ms", "2.00", "1", "50%"],
        ["builtin", "T2", "2", "8", "ms", "1.50", "4", "50%"],
    ]


def test_what_hangs_or_fails_is_a_line(tmp_path: Path) -> None:
    """A process that hangs ends with what it has started."""
    noted = tmp_path / "child"
    # A shell, which has started it long before on any machine.
    assert run_limited(["sh", "-c", f"sleep 60 & echo $! > '{noted}'; wait"], 1.5) == "no end within 1.5 s"
    pid = int(noted.read_text())
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)
    ended = "import sys; print('{}'); print('words\\nstrata: error: too small', file=sys.stderr); sys.exit(3)"
    assert run_limited([sys.executable, "-c", ended], 60) == "exit code 3: too small"
    assert run_limited([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 60) == "killed by SIGKILL: "
    assert run_limited([sys.executable, "-c", "print('a\\n{\"value\": 1}')"], 60) == [{"value": 1}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_that_is_told_to_end_ends_what_it_measures(tmp_path: Path, number: signal.Signals) -> None:
    """As by `timeout` and by make: what is measured has a session of its own, which no one else ends."""
    noted = tmp_path / "child"
    child = f"import os, time, pathlib; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(60)"
    start = f"import signal, sys; signal.signal({int(number)}, signal.SIG_DFL); "  # nohup has SIGHUP ignored
    start += "from benchmarks.parallel.measure import run_limited; "
    started = subprocess.Popen([sys.executable, "-c", f"{start}run_limited([sys.executable, '-c', {child!r}], 60)"])
    try:
        deadline = time.monotonic() + 180
        while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        started.send_signal(number)
        assert started.wait(60) == 128 + number
    finally:
        started.kill()
    assert not is_alive(int(noted.read_text()))


def test_what_needs_a_gpu_is_not_tried_on_a_processor_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(measuring, "run_limited", lambda *_: pytest.fail("it was measured"))
    words = ["bench", "parallel", "--models", "8B,70B", "--save", str(tmp_path / "found.jsonl")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ValueError)
    assert re.findall(r"left out: (\w+): it needs a GPU", result.output) == ["8B", "70B"]
    asked: list[Any] = []
    monkeypatch.setattr(measuring, "run_limited", lambda command, _: asked.append(command) or "exit code 1: no")
    machine = BenchMachine("cpu", 2, 1 << 40)
    monkeypatch.setattr("benchmarks.parallel.plan.this_machine", lambda *_: machine)
    CliRunner().invoke(app, [*words, "--device", "cpu", "--tests", "T2", "--ranks", "1"])
    assert [command[6] for command in asked] == ["8B", "70B"]


COMMAND = [sys.executable, "-m", "strata", "bench", "comm", "--device", "cpu", "--repeat", "2"]


def test_lines_of_two_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "comm.jsonl"
    command = [*COMMAND, "--sizes", "4KiB,64", "--dtype", "float32", "--save", str(saved), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [json.loads(line) for line in saved.read_text().splitlines()]
    algorithms = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}
    assert [(one["operation"], one["bytes"]) for one in lines] == [
        (name, size) for name, count in algorithms.items() for size in (64, 4096) for _ in range(count)
    ]
    assert {one["algorithm"] for one in lines if one["operation"] == "all_reduce"} == {"gloo", "in rank order"}
    sent = {one["operation"]: one["sent"] for one in lines if one["bytes"] == 4096}
    assert sent == {"all_reduce": 4096, "all_gather": 2048, "reduce_scatter": 2048, "all_to_all": 2048}
    for one in lines:
        assert (one["test"], one["ranks"], one["dtype"], one["unit"]) == ("comm", 2, "fp32", "us")
        assert len(one["all"]) == 2
        assert one["value"] > 0
        assert one["model"] is None  # of a link that is not known
        assert one["command"].startswith("strata bench comm")


def test_sizes_that_ranks_cannot_share_are_refused_by_all_in_one_line() -> None:
    done = subprocess.run([*COMMAND, "--sizes", "6"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "6 bytes are no 2 equal parts of bf16 numbers; give multiples of 4" in done.stderr


def test_sizes() -> None:
    assert parse_sizes("512, 8KiB,3MiB,1GiB") == [512, 8192, 3 << 20, 1 << 30]


def test_text_has_the_model_beside_what_was_measured() -> None:
    times = ([23.0, 24.5, 26.0], 30.1, 2.52)
    found = CommResult("comm", "all_reduce", "nccl", 2, 65536, 65536, "bf16", 24.5, "us", *times, "NVIDIA H200")
    assert found.text() == (
        "all_reduce of 64 KiB over 2 ranks, nccl: 24.5 us; a library by the model 30.1, floor 2.52; 2.67 GB/s sent"
    )
