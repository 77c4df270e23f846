"""Launches are noted as they would be compiled; processes that compile tell, share and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from strata.kernels.compiling import workers as module
from strata.kernels.compiling.noting import Variant, noting
from strata.kernels.compiling.workers import Outcome, Workers
from tests.kernels.compiling.doubled import doubled_kernel

pytest.importorskip("triton")


HOPPER = GPUTarget("cuda", 90, 32)
SCALES = (2.0, 3.0)


def noted(*arguments: tuple[Any, Any], **options: Any) -> list[dict[str, Any]]:
    """What is noted of launches of the kernel with these tensors and counts."""
    found: list[Variant] = []
    with noting(HOPPER, found.append):
        for x, count in arguments:
            doubled_kernel[(1,)](x, count, BLOCK=64, SCALES=SCALES, **options)
    return [json.loads(variant.text) for variant in found]


def kind_of(told: dict[str, Any]) -> tuple[Any, ...]:
    """Types of arguments and which are multiples of 16."""
    multiples = [key[0] for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True) if value]
    return (*told["signature"].values(), *multiples)


def memory() -> torch.Tensor:
    """Real memory that begins as a device's does, at a multiple of 256 bytes."""
    plain = torch.zeros(1024)
    skipped = -plain.data_ptr() % 256 // 4
    return plain[skipped : skipped + 512]


@pytest.mark.parametrize("first", [0, 1, 3, 4, 8, 20])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 2**31, 2**35 + 1])
def test_tensors_without_memory_are_told_apart_as_those_with(first: int, count: int) -> None:
    (real,) = noted((memory()[first:], count))
    (meta,) = noted((torch.zeros(512, device="meta")[first:], count))
    assert kind_of(meta) == kind_of(real)
    assert meta["key"] == real["key"]


def test_by_hand() -> None:
    x = torch.zeros(512, device="meta")
    assert list(map(kind_of, noted((x, 16), (x, 32), (x[1:], 1), (x[1:].double(), 7), (x[4:], 2**40)))) == [
        ("*fp32", "i32", "constexpr", "constexpr", 0, 1),
        ("*fp32", "constexpr", "constexpr", "constexpr"),
        ("*fp64", "i32", "constexpr", "constexpr", 0),
        ("*fp32", "i64", "constexpr", "constexpr", 0, 1),
    ]


def test_each_is_noted_once_and_again_in_the_next_context() -> None:
    x = torch.zeros(512, device="meta")
    assert len(noted((x, 16), (x, 48))) == 1
    assert len(noted((x, 16))) == 1


def test_it_is_the_entry_that_a_launch_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Variant] = []
    with noting(HOPPER, found.append):
        doubled_kernel[(1,)](torch.zeros(512, device="meta"), 7, BLOCK=64, SCALES=SCALES)
    (variant,) = found
    assert variant.name == "tests.kernels.compiling.doubled.doubled_kernel"
    assert variant.compile(HOPPER).hash == _as_launched().hash


def _as_launched() -> Any:
    """What Triton's own ahead-of-time call compiles for the same arguments."""
    from triton.runtime import driver

    from strata.kernels.compiling.noting import _NoDriver

    before = driver._active
    driver.set_active(_NoDriver(HOPPER))
    try:
        return doubled_kernel.warmup(torch.zeros(512, device="meta"), 7, BLOCK=64, SCALES=SCALES, grid=(1,))
    finally:
        driver._active = before
        doubled_kernel.device_caches.clear()


TARGET = GPUTarget("cuda", 90, 32)


def named(name: str, argument: str = "*bf16") -> Variant:
    return Variant(json.dumps({"name": f"a.{name}", "signature": {"x": argument}}))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a variant is called decides what becomes of it."""

    def compile_one(variant: Variant, _: Any, has_launcher: bool) -> Outcome:
        name = variant.name.partition(".")[2]
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "left":
            raise SystemExit(3)
        if name == "slow":
            time.sleep(1)
        if name == "hung":
            time.sleep(60)
        fault = "x" * 300_000 if name == "faulty" else None
        entry = f"{os.getpid()} launcher" if has_launcher else str(os.getpid())
        return Outcome(variant, entry, 0.5, found=name == "found", fault=fault)

    monkeypatch.setattr(module, "_compile", compile_one)
    monkeypatch.setattr(module, "_compile_driver", lambda: None)


def tried(names: list[str], count: int) -> list[Outcome]:
    workers = Workers(TARGET, count, lambda: None)
    try:
        for name in names:
            workers.add(named(name))
        return list(workers.outcomes())
    finally:
        workers.close()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.usefixtures("compiled")
class TestOutcomes:
    def test_each_variant_has_one_whoever_tried_it(self) -> None:
        names = [f"k{number}" for number in range(500)] + ["found"]
        outcomes = tried(names, 7)
        assert sorted(outcome.variant.name for outcome in outcomes) == sorted(f"a.{name}" for name in names)
        assert [outcome.variant.name for outcome in outcomes if outcome.found] == ["a.found"]
        assert all(outcome.fault is None and outcome.seconds == 0.5 for outcome in outcomes)

    def test_who_is_busy_takes_no_more(self) -> None:
        outcomes = tried(["slow", *(f"k{number}" for number in range(50))], 2)
        busy = next(outcome.entry.split()[0] for outcome in outcomes if outcome.variant.name == "a.slow")
        assert sum(outcome.entry.split()[0] == busy for outcome in outcomes) < 5

    def test_what_is_due_soon_comes_first(self) -> None:
        workers = Workers(TARGET, 1, lambda: None)
        try:
            workers.add(named("slow"))
            time.sleep(0.3)
            for number in range(20):
                workers.add(named(f"k{number}"))
            workers.add(named("long"), soon=True)
            outcomes = list(workers.outcomes())
        finally:
            workers.close()
        assert [outcome.variant.name for outcome in outcomes][:3] == ["a.slow", "a.long", "a.k0"]

    def test_one_variant_of_each_signature_has_the_launcher(self) -> None:
        """Whoever launches alike is told of when it is there."""
        workers = Workers(TARGET, 3, lambda: None)
        try:
            workers.add(named("slow"))
            for number in range(6):
                workers.add(named(f"k{number}", "*bf16" if number % 2 else "*fp32"))
            outcomes = [(outcome.variant.name, outcome.entry.endswith("launcher")) for outcome in workers.outcomes()]
        finally:
            workers.close()
        assert sorted(name for name, has_launcher in outcomes if has_launcher) == ["a.k0", "a.slow"]
        names = [name for name, _ in outcomes]
        assert sorted(names[:3]) == ["a.k0", "a.k2", "a.k4"]
        assert names[3] == "a.slow"

    def test_faults_may_be_longer_than_a_pipe_holds(self) -> None:
        assert [len(outcome.fault or "") for outcome in tried(["faulty"] * 4, 2)] == [300_000] * 4

    def test_nothing_to_do_ends_at_once(self) -> None:
        assert tried([], 3) == []

    @pytest.mark.parametrize(("name", "message"), [("killed", "by signal 9"), ("left", "with exit code 3")])
    def test_one_that_dies_is_an_error(self, name: str, message: str) -> None:
        with pytest.raises(RuntimeError, match=f"a process that compiles ended {message}"):
            tried(["k1", name, "k2"], 2)

    def test_none_outlasts_closing(self) -> None:
        workers = Workers(TARGET, 3, lambda: None)
        workers.add(named("hung"))
        processes = workers.processes
        assert all(map(is_running, processes))
        workers.close()
        assert not any(map(is_running, processes))


def test_a_stopped_one_ends_with_its_parent() -> None:
    """Which is killed, so that it can end nothing itself."""
    code = (
        "import os, signal, time; from triton.backends.compiler import GPUTarget; "
        "from strata.engine.lifeline import end_with_parent; "
        "from strata.kernels.compiling.workers import Workers; "
        "reading, writing = os.pipe(); "
        "initialize = lambda: (end_with_parent(signal.SIGKILL), os.write(writing, b'.')); "
        "workers = Workers(GPUTarget('cuda', 90, 32), 2, initialize); "
        "os.read(reading, 1), os.read(reading, 1); "
        "print(*workers.processes, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 2
        os.kill(processes[0], signal.SIGSTOP)
        parent.kill()
        parent.wait()
    for _ in range(100):
        if not any(map(is_running, processes)):
            return
        time.sleep(0.05)
    raise AssertionError("a fork is left")
