"""What the ranks of a tiny run do in tests, and `strata train` as a process whose ranks can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from strata.comm.launch import World
from strata.files.toml_tables import read_table
from strata.train.config import TrainConfig
from strata.train.finish import save_model
from strata.train.phases import PASSES
from strata.train.trainer import Trainer
from tests.train.tiny_run import Table

ALONE = World(0, 0, 1, torch.device("cpu"), None)


def train(world: World, table: Table, *, resume: bool = False, late: float = 0.0, saves: bool = False) -> Table:
    """A run on this rank. late: seconds that the passes of each step take longer here. saves: whether the first rank
    leaves the model.

    Returns the lines of the log, what people were told, and by step and pack the positions of the samples.
    """
    torch.set_num_threads(1)
    said: list[str] = []
    lines: list[Table] = []
    run = Trainer(read_table(TrainConfig, table), world, resume=resume, warn=said.append)
    stepper = _Seen(run.stepper)
    run.stepper = stepper  # type: ignore[assignment]
    begin = run._phases.at

    def at(phase: str) -> None:
        begin(phase)
        if phase == PASSES:
            time.sleep(late)

    run._phases.at = at  # type: ignore[method-assign]
    run.train(lines.append)
    if saves and world.is_main:
        save_model(run)
    return {"lines": lines, "said": said, "samples": stepper.samples}


class _Seen:
    """A stepper that notes which samples it trains on."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper
        self.samples: list[list[list[int]]] = []

    def __call__(self, batches: Sequence[Any], rate: float) -> Any:
        self.samples.append([one.samples.positions.tolist() for one in batches])
        return self._stepper(batches, rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)


def train_each(world: World, folder: Path, runs: dict[str, Table]) -> dict[str, Table]:
    """By name, runs one after another. runs: the keywords of `train`; late: of the last rank; alone: by the first rank,
    as one process, while the others wait.
    """
    found = {}
    for name, keywords in runs.items():
        is_last = world.rank == world.size - 1
        keywords["late"] = keywords.get("late", 0.0) * is_last
        if not keywords.pop("alone", False):
            found[name] = train(world, **keywords)
        elif world.is_main:
            found[name] = train(ALONE, **keywords)
    return found


def refused(world: World, folder: Path, runs: dict[str, Table]) -> dict[str, Table]:
    """By name, why each of these runs does not begin, on this rank, and what people were told.

    runs: the table of each, and whether it resumes.
    """
    found = {}
    for name, keywords in runs.items():
        said: list[str] = []
        reason = ""
        try:
            config = read_table(TrainConfig, keywords["table"])
            Trainer(config, world, resume=keywords.get("resume", False), warn=said.append)
        except ValueError as error:
            reason = str(error)
        found[name] = {"reason": reason, "said": said}
    return found


class Command:
    """`strata train` in processes of its own. A context manager: none of them outlives it."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "strata", "train", *map(str, arguments)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # ranks do not outlive their launcher
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was written to standard error."""
        _, said = self._process.communicate(timeout=600)
        return self._process.returncode, said

    def ranks(self) -> dict[int, int]:
        """The process of each rank that lives."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = {}
        for pid in map(int, children):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            found |= {int(one[5:]): pid for one in environment if one.startswith(b"RANK=")}
        return found

    def signal(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        places = self.ranks()
        for rank in ranks:
            os.kill(places[rank], number)

    def until(self, holds: Callable[[], Any]) -> None:
        """Wait for it, while the command runs."""
        deadline = time.monotonic() + 300
        while not holds():
            assert self._process.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.003)
