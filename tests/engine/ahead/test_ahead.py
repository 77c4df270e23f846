"""The process that compiles ahead: what it leaves, what it says, and that nothing about it is an error of a start."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

import strata
from strata.cli.main import app
from strata.engine.ahead import ahead, manifest, worker
from strata.engine.ahead.ahead import Compiling, KernelsAhead, Progress, compiling, shown
from strata.engine.engine_config import EngineConfig
from strata.engine.startup.memory import RankPlace, listed_memory
from strata.engine.startup.sequences import with_sequences
from strata.hardware.specs import device
from strata.kernels.compiling import disk_cache
from strata.kernels.compiling.noting import Variant
from strata.kernels.device_limits import DeviceLimits
from strata.models import weights
from tests.engine.ahead.dry import hopper

# Deterministic engines launch half as many kernels.
SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "deterministic": True,
}


def small(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(None, SMALL | options)


def compiled(asked: EngineConfig, log: Callable[[str], None] = print) -> Progress:
    with compiling(asked, hopper()) as process:
        return shown(process.progress(), log, show=False)


def keep_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    disk_cache._spare_folder.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    keep_in(tmp_path, monkeypatch)
    return tmp_path / "cache"


@dataclass(frozen=True)
class FirstStart:
    """What the first start of `small()` left and said. held: each variant that it brought to the device, and how many
    there were when the third came."""

    cache: Path
    progress: Progress
    held: list[str]
    held_early: int


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> FirstStart:
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in(folder, monkeypatch)
        with compiling(small(), hopper()) as process:
            start = Unstarted(process, lambda _: None)
            told: list[Progress] = []
            while (one := start._told.get()) is not None:
                told.append(one)
                if len(told) == 3:
                    held_early = len(start.held)
            start._told.put(None)
            assert start.finish(show=False) is True
    return FirstStart(folder / "cache", told[-1], start.held, held_early)


def smallest_kernels(cache: Path) -> list[Path]:
    """From the smallest on, which take least to compile again."""
    return sorted(cache.rglob("*.cubin"), key=lambda path: path.stat().st_size)


@pytest.fixture
def filled(folder: Path, first_start: FirstStart) -> Path:
    """A cache as the first start left it."""
    shutil.copytree(first_start.cache, folder)
    return folder


def test_what_is_compiled_is_found_by_the_next(filled: Path, first_start: FirstStart) -> None:
    """But for a file that is damaged; the list of all is written anew."""
    folder, first = filled, first_start.progress
    assert first == Progress(first.noted, first.noted, 0, (), True)
    assert first.noted > 10

    key = manifest.key_of(small(), hopper())
    found = manifest.read(key)
    assert found is not None
    assert found.is_on_disk
    assert len(found.variants) == first.noted
    damaged = smallest_kernels(folder)[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    listing = folder / key / "variants.json"
    listing.write_text(listing.read_text().replace("num_warps", "num_worps"))
    assert manifest.read(key) is None
    assert compiled(small()) == Progress(first.noted, first.noted, first.noted - 1, (), True)
    assert manifest.read(key) == found
    assert damaged.read_bytes() == whole


@pytest.fixture
def holder(filled: Path) -> Iterator[ForkProcess]:
    """A process that holds the lock for kernels, as one that compiles does."""
    forks = multiprocessing.get_context("fork")
    held = forks.Event()

    def hold() -> None:
        with worker._alone(0, print):
            held.set()
            time.sleep(600)

    process = forks.Process(target=hold, daemon=True)
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_start_waits_for_who_compiles_already(holder: ForkProcess, first_start: FirstStart) -> None:
    """And then finds all that it left."""
    said: list[str] = []

    def log(line: str) -> None:
        said.append(line)
        holder.kill()

    noted = first_start.progress.noted
    assert compiled(small(), log) == Progress(noted, noted, noted, (), True)
    assert said == [f"kernels: waiting for process {holder.pid}, which compiles already, for 120 s at most"]


def test_no_fork_holds_the_lock(folder: Path) -> None:
    """A killed process frees it, whatever its forks are at."""
    signed = folder / "strata.lock"
    with compiling(small(), hopper()) as process:
        number = process._process.pid
        until = time.monotonic() + 60
        while not (signed.exists() and signed.read_text() == str(number)) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(number, signal.SIGSTOP)
        forks = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        opened = {one: [os.readlink(path) for path in Path(f"/proc/{one}/fd").iterdir()] for one in (number, *forks)}
    held = {one for one, names in opened.items() if any(name.endswith("strata.lock") for name in names)}
    assert len(opened) > 1
    assert held == {number}


def test_warm_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Progress(waits_for="process 17"), Progress(3, 3, 3, (), True)]
    monkeypatch.setattr(Compiling, "progress", lambda _: iter(told))
    result = CliRunner().invoke(app, ["warm", "builtin", "--hardware", "h200"])
    assert "kernels: waiting for process 17, which compiles already, for 120 s at most" in result.output


def test_warm_takes_as_many_sequences_as_the_start_that_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured sizes follow from them, and the manifest is found by the same options."""
    warmed: list[EngineConfig] = []

    @contextmanager
    def noted(asked: EngineConfig, limits: DeviceLimits) -> Iterator[Compiling]:
        warmed.append(asked)
        yield Compiling.__new__(Compiling)

    monkeypatch.setattr("strata.cli.warm._limits", lambda _: hopper())
    monkeypatch.setattr(ahead, "compiling", noted)
    monkeypatch.setattr(Compiling, "progress", lambda _: iter([Progress(3, 3, 3, (), True)]))
    given = ["--max-num-seqs", "7"]
    for more in ([], given):
        assert CliRunner().invoke(app, ["warm", "8B", *more]).exit_code == 0
    place = RankPlace(torch.device("cuda"), hopper(), memory=listed_memory(device("h200")))
    asked = EngineConfig("8B", load_format="dummy")
    started = with_sequences(asked, weights.resolve("8B", "dummy")[0], place)
    assert started.max_num_seqs is not None
    assert [manifest.key_of(one, hopper()) for one in warmed] == [
        manifest.key_of(one, hopper()) for one in (started, replace(asked, max_num_seqs=7))
    ]


def test_a_start_waits_for_nobody_for_long(holder: ForkProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LONGEST_WAIT", 0.3)
    said: list[str] = []
    with compiling(small(), hopper()) as process:
        Unstarted(process, said.append).finish(show=False)
    assert holder.is_alive()
    assert said[0].startswith(f"kernels: waiting for process {holder.pid}")
    assert said[1].endswith(" found on the disk")


def test_a_full_disk_fails_no_process_that_compiles(folder: Path) -> None:
    """Of which the limit of a file's size stands in."""
    code = (
        "import resource; from strata.engine.ahead.worker import _alone\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with _alone(0, print): print('compiled')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("compiled\n", "", 0)


def test_a_folder_that_cannot_be_made_is_bypassed(filled: Path) -> None:
    spare = disk_cache._spare_folder()
    assert spare is not None
    for entry in filled.iterdir():
        entry.rename(spare / entry.name)
    filled.rmdir()
    filled.write_text("a file")
    some = smallest_kernels(spare)[:3]
    for kernel in some:
        kernel.unlink()
    first = compiled(small())
    assert first == Progress(first.noted, first.noted, first.noted - 3, (), True)
    assert all(kernel.exists() for kernel in some)


def test_other_kinds_of_starts_have_other_manifests(folder: Path) -> None:
    other = DeviceLimits("NVIDIA H200", (9, 0), 100, 132)
    keys = [
        manifest.key_of(asked, limits)
        for asked, limits in ((small(), hopper()), (small(dtype="float16"), hopper()), (small(), other))
    ]
    assert len(set(keys)) == 3
    assert manifest.key_of(small(seed=3, gpu_memory_utilization=0.5), hopper()) == keys[0]


def test_a_start_that_would_be_refused_is_a_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts an engine may have files of common names beside them, which stay out of it."""
    (tmp_path / "triton.py").write_text("raise ValueError('not the library')")
    monkeypatch.setenv("PYTHONPATH", str(Path(strata.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="max_model_len=100000 is over the model's longest sequence"):
        compiled(small(max_model_len=100_000))


class Unstarted(KernelsAhead):
    """Without a device, what there is to tell of."""

    def __init__(self, process: Compiling, log: Any) -> None:
        self._process, self._log, self._told, self._holding = process, log, SimpleQueue(), None
        self._compiles, self._are_held = True, False
        self.held: list[str] = []
        self.following = Thread(target=self._follow, args=(process,))
        self.following.start()

    def _hold(self, variants: Iterable[Variant]) -> bool:
        self.held += [variant.text for variant in variants]
        return True


def test_each_comes_to_the_device_when_it_is_ready(filled: Path, first_start: FirstStart) -> None:
    """Once, and the first long before the last is compiled."""
    assert 1 <= first_start.held_early < 10
    found = manifest.read(manifest.key_of(small(), hopper()))
    assert found is not None
    assert sorted(first_start.held) == sorted(variant.text for variant in found.variants)


def test_a_process_that_dies_fails_nothing(folder: Path) -> None:
    said: list[str] = []
    with compiling(small(), hopper()) as process:
        os.kill(process._process.pid, signal.SIGKILL)
        assert Unstarted(process, said.append).finish(show=False) is False
    (line,) = said
    assert line == "kernels could not be compiled ahead, so each is when it is first used: exit code -9"


def test_a_process_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LONGEST", 0.2)
    said: list[str] = []
    with compiling(small(), hopper()) as process:
        os.kill(process._process.pid, signal.SIGSTOP)
        assert Unstarted(process, said.append).finish(show=False) is False
    assert said[0].endswith("it was not done after 0.2 s")


def test_variants_that_cannot_be_held_fail_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Variant) -> None:
        raise RuntimeError("device kernel image is invalid")

    monkeypatch.setattr(Variant, "hold", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda _: threading.Lock())
    monkeypatch.setattr(DeviceLimits, "of", lambda _: hopper())
    said: list[str] = []
    key = manifest.key_of(small(), hopper())
    manifest.write(key, [Variant(json.dumps({"name": "a.b"}))], [])
    with KernelsAhead(small(), torch.device("cuda"), said.append).under_way() as kernels:
        assert kernels.finish(show=False) is False
    assert said == ["kernels could not be brought to the device ahead: RuntimeError: device kernel image is invalid"]


def unstartable(*_: Any, **__: Any) -> Any:
    raise OSError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("target", ["subprocess.Popen", "strata.engine.ahead.ahead.TemporaryFile"])
def test_a_process_that_cannot_be_started_fails_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(target, unstartable)
    monkeypatch.setattr(DeviceLimits, "of", lambda _: hopper())
    said: list[str] = []
    with KernelsAhead(small(), torch.device("cuda"), said.append).under_way() as kernels:
        assert kernels.finish(show=False) is False
    (line,) = said
    assert line.startswith("kernels could not be compiled ahead, so each is when it is first used: [Errno 11]")


def test_a_start_that_fails_waits_for_one_kernel_at_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Variant] = []
    begun, ended = threading.Event(), threading.Event()

    def hold(variant: Variant) -> None:
        held.append(variant)
        begun.set()
        ended.wait(60)

    monkeypatch.setattr(Variant, "hold", hold)
    monkeypatch.setattr(torch.cuda, "device", lambda _: threading.Lock())
    monkeypatch.setattr(DeviceLimits, "of", lambda _: hopper())
    manifest.write(manifest.key_of(small(), hopper()), [Variant(f'{{"name": "a.{one}"}}') for one in range(3)], [])
    kernels = KernelsAhead(small(), torch.device("cuda"), print)

    def start() -> None:
        with kernels.under_way():
            begun.wait(60)
            threading.Timer(0.2, ended.set).start()
            raise MemoryError

    with pytest.raises(MemoryError):
        start()
    assert len(held) == 1


@pytest.mark.parametrize("name", ["cuda:9", "cudax"])
def test_warm_names_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = CliRunner().invoke(app, ["warm", "8B", "--hardware", name])
    assert isinstance(result.exception, ValueError)
    assert repr(name) in str(result.exception)


def test_warm_without_triton_says_so() -> None:
    code = "import sys; sys.modules['triton'] = None; from strata.cli.warm import warm; warm('8B', 'h200')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.strip().endswith("ValueError: Triton is not installed: there is nothing to compile")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8B"], "no CUDA device is here: name the one to compile for, --hardware h200 or h100 or"),
        (["8B", "--hardware", "h300"], "device 'h300' is unknown; use auto, cuda, cuda:N, or one of h200"),
        (["8B", "--hardware", "a100"], "163 KiB of shared memory for a program"),
        (["80B", "--hardware", "h200"], "model folder '80B' does not exist"),
        (["8B", "--hardware", "h200", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["8B", "--hardware", "h200", "--tensor-parallel-size", "3"], "does not divide the 32 attention heads"),
    ],
)
def test_warm_says_what_cannot_be_done(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["warm", *arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_warm_compiles_for_a_device_that_is_not_here(filled: Path) -> None:
    key = manifest.key_of(small(), hopper())
    before = manifest.read(key)
    assert before is not None
    shutil.rmtree(filled / key)
    for kernel in smallest_kernels(filled)[:3]:
        shutil.rmtree(kernel.parent)
    command = ["warm", "builtin", "--hardware", "h200", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    command += ["--max-model-len", "64", "--deterministic"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert " 3 compiled" in result.output
    again = manifest.read(key)
    assert again == before
    assert again.is_on_disk


def test_warm_does_not_compile_for_a_folder_that_takes_nothing(folder: Path) -> None:
    """Where an engine would keep kernels elsewhere: who fills a folder for others learns that nothing is in it."""
    folder.write_text("a file")
    result = CliRunner().invoke(app, ["warm", "builtin", "--hardware", "h200"])
    assert isinstance(result.exception, ValueError)
    assert f"kernels cannot be kept in {folder}: File exists" in str(result.exception)
    assert "TRITON_CACHE_DIR" in str(result.exception)


def test_warm_does_not_compile_for_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> Any:
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    result = CliRunner().invoke(app, ["warm", "builtin", "--hardware", "h200"])
    assert f"kernels cannot be kept in {folder}: No space left on device" in str(result.exception)


def test_warm_fails_if_a_kernel_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Progress(3, 3, 1, ("strata.kernels.norm.norm.rms_norm_kernel: PTXASError: no",), True)
    monkeypatch.setattr(Compiling, "progress", lambda _: iter([told]))
    result = CliRunner().invoke(app, ["warm", "builtin", "--hardware", "h200"])
    assert result.exit_code == 1
    assert "could not be compiled: strata.kernels.norm.norm.rms_norm_kernel: PTXASError: no" in result.output
    assert "1 compiled, 1 found on the disk" in result.output
