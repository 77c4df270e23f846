"""Ranks that are killed, stopped or fail: the engine ends with the cause, nothing is left, and another can start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.embeddings.pooling import Pooled, PoolRequest
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault
from strata.engine.plan import StepPlan
from strata.engine.ranks import followers, ranked_runner, world
from strata.engine.ranks.followers import Followers
from strata.engine.ranks.ranked_runner import RankedPooler, RankedRunner
from strata.engine.runner import Launched
from tests.engine.ranks.layouts import (
    LONG_LAYOUTS,
    SHORT_LAYOUTS,
    Layout,
    assert_alike,
    assert_same_ids,
    greedy,
    prompt,
)
from tests.serve.running import is_alive

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 64, "max_model_len": 512, "verbose": False}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def others(llm: LLM) -> dict[int, int]:
    assert llm.engine.ranks is not None
    return llm.engine.ranks.processes


def test_a_rank_that_stops_is_named_and_another_engine_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "SILENT_SECONDS", 2.0)
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    pids = others(llm)
    began: list[float] = []

    def stop() -> None:
        began.append(time.monotonic())
        os.kill(pids[1], signal.SIGSTOP)

    threading.Timer(0.3, stop).start()
    cause = re.escape(f"rank 1 of 2 (process {pids[1]}) has not answered for 2 s: it is stopped")
    with pytest.raises(EngineFault, match=cause):
        llm.generate([[1, 2, 3]] * 40, LONG, use_tqdm=False)
    assert time.monotonic() - began[0] < 30
    assert not is_alive(pids[1])
    with pytest.raises(EngineFault, match=cause):  # from now on
        llm.generate([[1]], LONG, use_tqdm=False)
    with pytest.raises(EngineFault, match=cause):
        llm.embed([[1]], use_tqdm=False)

    again = LLM(tensor_parallel_size=2, **OPTIONS)  # while the other is kept
    assert again.generate([[1, 2]], SHORT, use_tqdm=False)[0].finished
    pids = others(again)
    before = time.monotonic()
    del again
    assert time.monotonic() - before < 30
    assert not any(is_alive(pid) for pid in pids.values())


def test_ranks_that_were_stopped_together_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z and fg: rank 0 may wake up first, and finds the other as it was long ago."""
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    pids, asleep = others(llm), [0.0]
    monkeypatch.setattr(followers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + asleep[0]))

    def wake_up() -> None:
        time.sleep(0.6)
        asleep[0] = 1000.0
        time.sleep(0.6)
        os.kill(pids[1], signal.SIGCONT)

    os.kill(pids[1], signal.SIGSTOP)
    threading.Thread(target=wake_up).start()
    outputs = llm.generate([[1, 2, 3]] * 2, SHORT, use_tqdm=False)
    assert asleep[0]
    assert all(output.finished for output in outputs)


def test_a_rank_that_ends_while_ranks_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Followers] = []
    connected, start = world.connected, Followers.__init__

    def remembered(self: Followers, *arguments: Any) -> None:
        start(self, *arguments)
        made.append(self)

    def lonely(*arguments: Any, **options: Any) -> Any:
        os.kill(made[0].processes[1], signal.SIGSTOP)
        os.kill(made[0].processes[1], signal.SIGKILL)
        return connected(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(world, "_JOIN_SECONDS", 2.0)
        patch.setattr(Followers, "__init__", remembered)
        patch.setattr(world, "connected", lonely)
        with pytest.raises(EngineFault, match=r"rank 1 of 2 \(process \d+\) was killed by SIGKILL"):
            LLM(tensor_parallel_size=2, **OPTIONS)
    again = LLM(tensor_parallel_size=2, **OPTIONS)
    assert again.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


def test_an_error_of_rank_0_in_a_step_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_END_SECONDS", 0.5)
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    pids = others(llm)
    assert llm.engine.ranks is not None
    monkeypatch.setattr(llm.engine.ranks._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(EngineFault, match="rank 0 of 2 has failed: ZeroDivisionError"):
        llm.generate([[1, 2]], LONG, use_tqdm=False)
    assert not any(is_alive(pid) for pid in pids.values())


# Run by a follower before its own program: once it has begun to say that it lives, a library holds Python's lock.
HELD = """
import ctypes, threading, time
def hold():
    while all(one.name != "beats" for one in threading.enumerate()):
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(2)
threading.Thread(target=hold, daemon=True).start()
"""


def test_a_library_that_holds_the_lock_of_a_rank_that_starts_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(followers, "SILENT_SECONDS", 1.0)
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


def test_a_rank_that_fails_while_it_starts_is_named(tmp_path: Path) -> None:
    ranks = Followers(EngineConfig(str(tmp_path / "nothing"), tensor_parallel_size=2, device="cpu"), lambda line: None)
    try:
        with pytest.raises(EngineFault, match=r"rank 1 of 2 \(process \d+\) has failed: .*nothing"):
            ranks.min_over_ranks(0)
    finally:
        ranks.stop()


def test_an_error_of_what_watches_the_ranks_ends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreadable(*arguments: Any) -> bool:
        raise ValueError("no message")

    monkeypatch.setattr(Followers, "_take", unreadable)
    ranks = Followers(EngineConfig(str(tmp_path / "nothing"), tensor_parallel_size=2, device="cpu"), lambda line: None)
    try:
        with pytest.raises(EngineFault, match="can no longer watch the others: ValueError"):
            ranks.min_over_ranks(0)
        assert not any(is_alive(pid) for pid in ranks.processes.values())
    finally:
        ranks.stop()


def test_an_engine_that_is_collected_by_the_thread_that_watches_its_ranks_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Followers, "_hanging", Followers.stop)  # garbage is collected wherever something is made
    ranks = Followers(EngineConfig(str(tmp_path / "nothing"), tensor_parallel_size=2, device="cpu"), lambda line: None)
    ranks._watching.join(60)
    assert not ranks._watching.is_alive()
    assert not any(is_alive(pid) for pid in ranks.processes.values())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux alone")
def test_ranks_end_with_a_rank_0_that_is_killed() -> None:
    program = f"""
import time
from strata import LLM
if __name__ == "__main__":
    llm = LLM(tensor_parallel_size=2, **{OPTIONS!r})
    print(*llm.engine.ranks.processes.values(), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1
        process.kill()
    until = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


class Never:
    """An event that does not come."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pytest.fail("rank 0 waits inside the driver")


class Lost:
    """Followers of which one is lost once they have been asked a few times."""

    asked, stages = 0, 1

    def send(self, message: object) -> int:
        return 0

    def forget_steps(self, before: int) -> None:
        pass

    def check(self) -> None:
        self.asked += 1
        if self.asked > 3:
            raise EngineFault("rank 1 of 2 has ended")


def test_vectors_under_way_end_with_a_rank() -> None:
    event: Any = Never()
    pooler: Any = SimpleNamespace(launch=lambda requests: Pooled(torch.zeros(1, 4), event))
    followers: Any = Lost()
    pooled = RankedPooler(pooler, followers).launch([PoolRequest([1], "last")])
    assert not pooled.ended
    with pytest.raises(EngineFault, match="rank 1 of 2 has ended"):
        pooled.wait()


def test_a_step_under_way_ends_with_a_rank() -> None:
    event: Any = Never()
    runner: Any = SimpleNamespace(launch=lambda plan: Launched(plan, torch.zeros(1), event))
    followers: Any = Lost()
    step: Any = RankedRunner(runner, followers, None, None).launch(StepPlan((), (), (), (), 0))
    assert not step.ended
    with pytest.raises(EngineFault, match="rank 1 of 2 has ended"):
        step.wait()


def test_a_handler_of_ctrl_c_that_is_not_pythons_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program in C that has Python in it."""

    def handle(number: int, handler: object) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")

    theirs = SimpleNamespace(SIGINT=signal.SIGINT, getsignal=lambda number: None, signal=handle)
    monkeypatch.setattr(ranked_runner, "signal", theirs)
    runner: Any = SimpleNamespace(settle=lambda: None)
    followers: Any = Lost()
    RankedRunner(runner, followers, None, None).settle()


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
