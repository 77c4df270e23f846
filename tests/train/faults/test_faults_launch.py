"""The launcher against ranks that are killed, fail, refuse, and are interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.cli.ending import explanation
from strata.train.launch import REFUSED, ended_at_once, launch
from tests.train.fault_ranks import STEPS


def start(run: str, folder: Path, ranks: int, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.train.fault_ranks", "launch", str(ranks), str(restarts), run, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def log_of(folder: Path) -> list[dict[str, float]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_reached(folder: Path, step: int, attempt: int) -> bool:
    return any(one["step"] >= step and one["attempt"] == attempt for one in log_of(folder))


def until(holds, seconds: float = 180.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """A zombie, which some other parent has yet to reap, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_killed_twice_in_a_row(tmp_path: Path) -> None:
    """The run ends as it would have: no step is lost or counted twice."""
    chance = random.Random(5)
    running = start("counts", tmp_path, 2, 3)
    kills = []
    for attempt in range(2):
        at = chance.randint(attempt * 10 + 3, attempt * 10 + 9)
        until(lambda at=at, attempt=attempt: has_reached(tmp_path, at, attempt))
        victim = int((tmp_path / f"pid-{chance.randrange(2)}").read_text())
        os.kill(victim, signal.SIGKILL)
        kills.append(time.time())
    _, said = running.communicate(timeout=300)
    assert running.returncode == 0, said
    state = json.loads((tmp_path / "checkpoint.json").read_text())
    assert state == {"step": STEPS, "sum": float(sum(2 * step for step in range(STEPS)))}
    log = log_of(tmp_path)
    pauses = [min(one["at"] for one in log if one["attempt"] == attempt) - kills[attempt - 1] for attempt in (1, 2)]
    print(f"seconds from a kill to the first new step: {', '.join(f'{pause:.2f}' for pause in pauses)}")
    assert max(pauses) < 120  # in which ranks import torch
    assert said.count("was killed by SIGKILL; restart ") == 2
    assert "Traceback" not in said  # of the ranks that only lost a peer


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_starts_killed_ranks_again_as_well(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, "-m", "tests.train.fault_ranks", "counts", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: has_reached(tmp_path, 5, 0))
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        _, said = running.communicate(timeout=300)
    finally:
        running.terminate()
        running.wait()
    assert running.returncode == 0, said
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == STEPS


def test_the_rank_that_failed_first_is_shown_once(tmp_path: Path) -> None:
    running = start("raises", tmp_path, 3, 0)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 1
    assert said.count("Traceback (most recent call last)") == 1, said
    assert said.count("RuntimeError: the fault of rank 1") == 1
    assert said.endswith("strata: rank 1 failed with exit code 1\n")


def test_what_would_fail_alike_is_not_tried_again(tmp_path: Path) -> None:
    running = start("refuses", tmp_path, 3, 5)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 1
    assert said == "strata: error: heads do not divide\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    """Interrupted, ranks end by themselves, and what they started is killed; if the launcher is killed, so are they."""
    running = start("waits", tmp_path, 2, 3)
    files = [tmp_path / f"pids-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
    ranks, children = zip(*(map(int, file.read_text().split()) for file in files), strict=True)
    try:
        running.send_signal(number)
        running.wait(timeout=120)
        until(lambda: not any(map(is_alive, ranks)))
        if number == signal.SIGINT:
            assert running.returncode == 130
            assert all((tmp_path / f"interrupted-{rank}").exists() for rank in range(2))
            until(lambda: not any(map(is_alive, children)))
    finally:
        running.kill()
        for pid in filter(is_alive, children):
            os.kill(pid, signal.SIGKILL)
        running.communicate()


def test_ranks_that_do_not_hear_an_interrupt_are_killed_soon_and_what_they_say_of_it_is_dropped(
    tmp_path: Path,
) -> None:
    running = start("deaf", tmp_path, 2, 3)
    until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert time.monotonic() - began < 60  # GRACE_SECONDS, on a machine that does much else
    assert (running.returncode, said.splitlines()) == (130, ["before"] * 2)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks and 0 restarts: at least 1 rank"):
        launch(["true"], 0)


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        ("ValueError('no')", REFUSED, "strata: error: no"),
        (
            "OSError(13, 'No', 'here')",
            1,
            "strata: error: here: No; choose a path that you may use, or change its permissions",
        ),
        ("OSError('no')", 1, "OSError: no"),
    ],
)
def test_a_rank_that_fails_ends_although_python_would_wait(
    monkeypatch: pytest.MonkeyPatch, error: str, code: int, last: str
) -> None:
    """As NCCL's end waits for captured steps; the launcher waits for the rank, and so would all others."""
    lines = (
        "import threading",
        "from strata.cli.ending import explanation",
        "from strata.train.launch import ended_at_once",
        "threading.Thread(target=threading.Event().wait).start()",
        "with ended_at_once(explanation):",
        f"    raise {error}",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(command, env=os.environ | {"RANK": "0"}, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stderr.splitlines()[-1]) == (code, last)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="no"), ended_at_once(explanation):
        raise ValueError("no")
