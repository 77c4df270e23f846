"""What goes wrong with checkpoints: full disks, processes that are killed, damaged files, other recipes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.train.checkpoints import checkpointer as module
from strata.train.checkpoints import folder
from strata.train.checkpoints.checkpointer import Checkpointer
from strata.train.checkpoints.folder import checkpoints, newest, read_state
from strata.train.checkpoints.index import CorruptCheckpoint, Index
from strata.train.checkpoints.reader import load
from strata.train.checkpoints.state import StateShard
from tests.parallel.ranks import run_ranks
from tests.train.samples import ALONE

FEW, MANY = 60_000, 1_000_000
RECIPE = {"run": {"seed": 3}, "data": {"files": ["a", "b"]}}


def pieces_with(value: float, rank: int = 0, ranks: int = 1, elements: int = FEW) -> list[StateShard]:
    """This rank's part of two tensors, filled with a value."""
    part = elements // ranks
    return [
        StateShard(kind, "weight", (elements,), ((0, elements),), rank * part, torch.full((part,), float(value)))
        for kind in ("master", "exp_avg")
    ]


def state_at(step: int) -> dict[str, Any]:
    return {"recipe": RECIPE, "position": {"step": step}}


def write(folder: Path, *steps: int, keep: int = 3, elements: int = FEW) -> list[Path]:
    """Checkpoints of one process, whose tensors hold the step."""
    warnings: list[str] = []
    checkpointer = Checkpointer(folder, ALONE, keep=keep, warn=warnings.append)
    for step in steps:
        checkpointer.start(step, state_at(step), pieces_with(step, elements=elements))
        checkpointer.finish()
    assert not warnings
    return checkpoints(folder)


def one_rank_cannot_write(world: World, folder: Path) -> dict[str, Any]:
    """A checkpoint that fails between two that do not, and what is restored once a file is damaged."""
    warnings: list[str] = []
    where = folder / "checkpoints"
    unfinished = where / ".step-00000009.part"
    if world.is_main:
        unfinished.mkdir(parents=True)
    checkpointer = Checkpointer(where, world, keep=2, warn=warnings.append)
    cleared = not unfinished.exists()  # nothing else: the other rank may have begun the first checkpoint
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = []
    for step in (1, 2, 3):
        if step == 2 and world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        checkpointer.start(step, state_at(step), pieces_with(step, world.rank, world.size))
        checkpointer.before_update()
        told = len(warnings)
        while (path := checkpointer.poll()) is None and len(warnings) == told:
            time.sleep(0.001 * (1 + world.rank))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        remains = (where / f".step-{step:08}.part").exists()
        seen.append([path and path.name, [one.name for one in checkpoints(where)], remains])
    shards = pieces_with(float("nan"), world.rank, world.size)
    restored = [checkpointer.restore(shards, RECIPE)]
    values = [shard.tensor.unique().tolist() for shard in shards]
    if world.is_main:
        flip(where / "step-00000003" / "rank-00001.safetensors", -5)
    restored.append(checkpointer.restore(shards, RECIPE))
    values += [shard.tensor.unique().tolist() for shard in shards]
    return {"cleared": cleared, "seen": seen, "warnings": warnings, "restored": restored, "values": values}


def test_a_full_disk_on_one_rank_fails_the_checkpoint_on_all(tmp_path: Path) -> None:
    ranks = run_ranks(one_rank_cannot_write, 2, tmp_path)
    for rank in ranks:
        assert rank["cleared"]
        assert rank["seen"] == [
            ["step-00000001", ["step-00000001"], False],
            [None, ["step-00000001"], False],
            ["step-00000003", ["step-00000001", "step-00000003"], False],
        ]
        full, damaged = rank["warnings"]
        assert full == (
            "the checkpoint of step 2 was not written (rank 1: OSError: [Errno 27] File too large); those before remain"
        )
        assert "step-00000003 is corrupt: rank-00001.safetensors: the checksum of exp_avg/weight" in damaged
        assert rank["restored"] == [state_at(3), state_at(1)]
        assert rank["values"] == [[3.0], [3.0], [1.0], [1.0]]


def killed_while_writing(folder: Path, kills: int) -> None:
    """Processes that write checkpoints one after another, each killed at a random moment; then one is read."""
    draw = random.Random(5)
    began = time.perf_counter()
    write(folder, 1, 2, elements=MANY)
    last, unfinished, seconds = 2, 0, (time.perf_counter() - began) / 2
    for _ in range(kills):
        before = last + 1
        if not (process := os.fork()):
            checkpointer = Checkpointer(folder, ALONE, keep=2, warn=print)
            for step in range(before, before + 1000):
                checkpointer.start(step, state_at(step), pieces_with(step, elements=MANY))
                checkpointer.finish()
        time.sleep(draw.uniform(0.5, 10) * seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        unfinished += bool(list(folder.glob(".step-*.part")))
        path = newest(folder, _fail)
        assert path is not None, "all checkpoints have gone"
        shards = pieces_with(float("nan"), elements=MANY)
        load(path, shards)
        step = read_state(path)["position"]["step"]
        assert path.name == f"step-{step:08}"
        assert step >= last, "a checkpoint that was whole has gone"
        assert all((shard.tensor == step).all() for shard in shards)
        last = step
    print(json.dumps({"last": last, "unfinished": unfinished}))


def _fail(message: str) -> None:
    raise AssertionError(message)


def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    code = f"from {__name__} import *; killed_while_writing(Path({str(tmp_path)!r}), kills=12)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["last"] > 5
    assert found["unfinished"] > 2  # the kills did hit checkpoints in the middle
    write(tmp_path, found["last"] + 1, elements=MANY)
    assert not list(tmp_path.glob(".*"))


def flip(file: Path, at: int) -> None:
    """Change one bit of a file. at: the byte, from the end if negative."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of the data": (
        lambda path: flip(path / "rank-00000.safetensors", -100),
        r"rank-00000\.safetensors: the checksum of exp_avg/weight is not that of what was written",
    ),
    "the header": (lambda path: flip(path / "rank-00000.safetensors", 9), r"rank-00000\.safetensors: "),
    "a truncated file": (
        lambda path: cut(path / "rank-00000.safetensors"),
        r"rank-00000\.safetensors: it has \d+ bytes, \d+ were written",
    ),
    "a missing file": (lambda path: (path / "rank-00000.safetensors").unlink(), r"rank-00000\.safetensors: it is miss"),
    "a missing index": (lambda path: (path / "index.json").unlink(), r"index\.json: it is missing"),
    "an index cut short": (lambda path: cut(path / "index.json") or cut(path / "index.json"), r"index\.json: it is no"),
    "a missing state": (lambda path: (path / "state.json").unlink(), r"state\.json: it is missing"),
    "a changed state": (lambda path: flip(path / "state.json", 20), r"state\.json: its checksum is not that"),
    "no folder": (lambda path: shutil.rmtree(path) or path.mkdir(), r"index\.json: it is missing"),
}
SEEN_BY_SIZE = {*DAMAGE} - {"a byte of the data", "the header"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_taken(kind: str, tmp_path: Path) -> None:
    older, latest = write(tmp_path, 10, 20)
    damage, message = DAMAGE[kind]
    damage(latest)
    full = rf"^checkpoint {latest} is corrupt: {message}[^;]*$"
    with pytest.raises(CorruptCheckpoint, match=full):
        load(latest, pieces_with(0))
    warnings: list[str] = []
    assert newest(tmp_path, warnings.append) == (older if kind in SEEN_BY_SIZE else latest)
    assert len(warnings) == (kind in SEEN_BY_SIZE)
    warnings.clear()
    checkpointer = Checkpointer(tmp_path, ALONE, keep=3, warn=warnings.append)
    shards = pieces_with(float("nan"))
    assert checkpointer.restore(shards, RECIPE) == state_at(10)
    assert all((shard.tensor == 10).all() for shard in shards)
    assert len(warnings) == 1
    damage(older)
    with pytest.raises(ValueError, match=r"all 2 checkpoints in .* are corrupt; remove them to begin again"):
        checkpointer.restore(shards, RECIPE)


def test_tables_that_do_not_make_up_whole_tensors_are_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 10)
    table = json.loads((path / "index.json").read_text())
    for change, message in (
        ({"start": 1}, "a shard of master/weight lies outside of it"),
        ({"elements": 59_999}, "master/weight has 60000 elements, and the shards together 59999"),
        ({"shape": [60_000.5]}, r"Expected `int`, got `float` - at `\$\.pieces\[0\]\.shape\[0\]`"),
        ({"surprise": 1}, r"unknown field `surprise` - at `\$\.pieces\[0\]`"),
    ):
        changed = table | {"pieces": [table["pieces"][0] | change, *table["pieces"][1:]]}
        (path / "index.json").write_text(json.dumps(changed))
        with pytest.raises(CorruptCheckpoint, match=message):
            load(path, pieces_with(0))
    (path / "index.json").write_text(json.dumps(table | {"format": "strata-checkpoint-9"}))
    with pytest.raises(ValueError, match=r"format 'strata-checkpoint-9'; this version reads 'strata-checkpoint-1'"):
        newest(tmp_path, _fail)


def test_pieces_that_overlap_are_refused_before_memory_is_left_as_it_was(tmp_path: Path) -> None:
    """They have as many elements as the tensor, and leave a hole."""
    (path,) = write(tmp_path, 10)
    table = json.loads((path / "index.json").read_text())
    first, *others = table["pieces"]
    halves = [first | {"start": start, "elements": FEW // 2} for start in (0, FEW // 4)]
    (path / "index.json").write_text(json.dumps(table | {"pieces": [*halves, *others]}))
    shards = pieces_with(float("nan"))
    with pytest.raises(CorruptCheckpoint, match="two shards of master/weight overlap"):
        load(path, shards)
    assert all(shard.tensor.isnan().all() for shard in shards)
    assert newest(tmp_path, lambda _: None) is None


def test_another_recipe_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    write(tmp_path, 10)
    checkpointer = Checkpointer(tmp_path, ALONE, keep=1, warn=_fail)
    with pytest.raises(ValueError, match=r"cannot resume .*step-00000010: data\.files was \['a', 'b'\] and is now"):
        checkpointer.restore(pieces_with(0), RECIPE | {"data": {"files": ["a"]}})


def test_the_latest_remain_and_a_repeated_step_is_replaced(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path, ALONE, keep=2, warn=_fail).restore(pieces_with(0), RECIPE) is None
    assert newest(tmp_path, _fail) is None
    assert [path.name[-2:] for path in write(tmp_path, 10, 20, 30, keep=2)] == ["20", "30"]
    # A run that was resumed at 20: what it writes does not give way to what it left behind.
    assert [path.name[-2:] for path in write(tmp_path, 25, keep=1)] == ["25", "30"]
    flip(tmp_path / "step-00000030" / "state.json", 20)
    assert [path.name[-2:] for path in write(tmp_path, 30, keep=1)] == ["30"]
    assert newest(tmp_path, _fail) == tmp_path / "step-00000030"
    with pytest.raises(ValueError, match="keep = 0 checkpoints must be at least 1"):
        Checkpointer(tmp_path, ALONE, keep=0, warn=_fail)


def test_a_table_that_cannot_be_written_leaves_the_checkpoints_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    warnings: list[str] = []
    target = Checkpointer(tmp_path, ALONE, keep=1, warn=warnings.append)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "to_json", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        target.start(20, state_at(20), pieces_with(20))
        assert target.finish() is None
    (warning,) = warnings
    assert "step 20 was not written (rank 0: OSError: [Errno 28] No space left on device)" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    target.start(30, state_at(30), pieces_with(30))
    assert target.finish() == tmp_path / "step-00000030"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030"]


def test_a_mistake_while_publishing_is_told_and_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own, too: all ranks wait for the thread to say how it went."""
    warnings: list[str] = []
    target = Checkpointer(tmp_path, ALONE, keep=1, warn=warnings.append)
    monkeypatch.setattr(Index, "check", lambda self: {}["missing"])
    target.start(20, state_at(20), pieces_with(20))
    assert target.finish() is None
    (warning,) = warnings
    assert "step 20 was not written (rank 0: KeyError: 'missing')" in warning
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_may_not_last_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails when all is written and the checkpoint has its name."""
    write(tmp_path, 10)
    warnings: list[str] = []
    target = Checkpointer(tmp_path, ALONE, keep=1, warn=warnings.append)
    flush = folder._flush_folder
    monkeypatch.setattr(folder, "_flush_folder", lambda path: _eio() if path == tmp_path else flush(path))
    target.start(20, state_at(20), pieces_with(20))
    assert target.finish() is None
    assert "step 20 was not written" in warnings[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def _eio() -> None:
    raise OSError(5, "Input/output error")


def steps_while_publishing(world: World, where: Path) -> dict[str, Any]:
    """Polls of two ranks while the first one's disk takes its time, and what they hear of what could not be removed."""
    warnings: list[str] = []
    checkpointer = Checkpointer(where / "checkpoints", world, keep=1, warn=warnings.append)
    goes_on, publish = threading.Event(), module.publish
    module.publish = lambda *args: (goes_on.wait(), publish(*args))[1]  # type: ignore[assignment]
    module.prune = lambda *args: _eio()  # type: ignore[assignment]
    checkpointer.start(1, state_at(1), pieces_with(1, world.rank, world.size))
    while not checkpointer._is_handed_over:
        assert checkpointer.poll() is None
    found = [checkpointer.poll() for _ in range(20)]
    goes_on.set()
    path = checkpointer.finish()
    return {"meanwhile": found, "path": path and path.name, "warnings": warnings}


def test_steps_go_on_while_a_checkpoint_is_published(tmp_path: Path) -> None:
    for rank in run_ranks(steps_while_publishing, 2, tmp_path):
        assert rank["meanwhile"] == [None] * 20
        assert rank["path"] == "step-00000001"
        (warning,) = rank["warnings"]
        assert re.fullmatch(r"checkpoints before .*step-00000001 could not be removed: .*Input/output error", warning)


def steps_of_a_late_rank(world: World, where: Path) -> dict[str, Any]:
    """The second rank comes to its first poll once the first one has gone on from its own."""
    checkpointer = Checkpointer(where / "checkpoints", world, keep=1, warn=_fail)
    checkpointer.start(1, state_at(1), pieces_with(1, world.rank, world.size))
    went_on = where / "went on"
    until = time.monotonic() + 20
    while not world.is_main and not went_on.exists() and time.monotonic() < until:
        time.sleep(0.01)
    waited = not world.is_main and not went_on.exists()
    assert checkpointer.poll() is None
    went_on.touch()
    path = checkpointer.finish()
    return {"waited": waited, "path": path and path.name}


def test_no_rank_waits_at_a_poll_for_one_that_is_less_than_a_step_behind(tmp_path: Path) -> None:
    for rank in run_ranks(steps_of_a_late_rank, 2, tmp_path):
        assert rank == {"waited": False, "path": "step-00000001"}


def test_a_start_waits_for_the_checkpoint_before_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes as long as the test says."""
    may_end = threading.Event()
    sync = os.fsync

    def slow(file: int) -> None:
        may_end.wait()
        sync(file)

    monkeypatch.setattr(os, "fsync", slow)
    checkpointer = Checkpointer(tmp_path, ALONE, keep=5, warn=_fail)
    shards = pieces_with(1)
    checkpointer.prepare(shards)
    assert checkpointer.stalled_seconds == 0
    checkpointer.start(1, state_at(1), shards)
    assert checkpointer.poll() is None
    checkpointer.before_update()
    for shard in shards:
        shard.tensor.fill_(2)
    stalled = checkpointer.stalled_seconds
    threading.Timer(0.2, may_end.set).start()
    checkpointer.start(2, state_at(2), shards)
    assert may_end.is_set()
    assert checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert checkpointer.stalled_seconds > stalled
    checkpointer.finish()
    for step in (1, 2):
        load(tmp_path / f"step-{step:08}", shards)
        assert all((shard.tensor == step).all() for shard in shards)


def test_what_cannot_be_stored_is_an_error_before_training(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, ALONE, keep=1, warn=_fail)
    for tensor in (torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"master of weight must be flat, contiguous and of a float dtype, not "):
            checkpointer.prepare([StateShard("master", "weight", (4,), ((0, 4),), 0, tensor)])
