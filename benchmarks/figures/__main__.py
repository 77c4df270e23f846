"""Repeats what the documents' figures were measured with, on this machine: the commands of figures.toml.

    python -m benchmarks.figures --list
    python -m benchmarks.figures precision sparsity --folder measured --limit 560

Runs begin in the order of the list, each with as many GPUs of its own as it asks for, so several go on at once where
there are several GPUs, or those of CUDA_VISIBLE_DEVICES. One that waits for more GPUs than are free, or for all others
to end, is overtaken by those behind it. FOLDER gets the lines that the commands save, under the names
that they have in benchmarks/results, the output of each (logs/NAME.txt), and a line for each run (runs.jsonl). A run
that is expected to take longer than what is left of the limit, or that asks for more GPUs than there are, is left out;
the same call goes on with it, and with those that failed, until another commit is checked out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.processes import end_on_signals
from strata.bench.result import provenance

RUNS = Path(__file__).with_name("figures.toml")
_BETWEEN_LOOKS = 0.05  # seconds, at what is under way


@dataclass(frozen=True)
class Run:
    """A command and what it is for.

    seconds: that it is expected to take on an H200; it is ended after twice as many. results: the file that it saves
    lines to, empty if it saves none. decides: the figure that is asked of it. gpus: that it runs on. alone: it keeps
    all processors busy, so nothing runs beside it.
    """

    name: str
    topic: str
    command: str
    seconds: float
    decides: str
    results: str = ""
    gpus: int = 1
    alone: bool = False

    def arguments(self, folder: Path) -> list[str]:
        words = shlex.split(self.command.replace("{save}", str(folder / self.results)))
        program = {"python": [sys.executable], "strata": [sys.executable, "-m", "strata"]}[words[0]]
        return [*program, *words[1:]]


def read(path: Path) -> list[Run]:
    return [Run(**one) for one in tomllib.loads(path.read_text(encoding="utf-8"))["run"]]


def done(folder: Path, commit: str) -> set[str]:
    """Names of the runs that ended well on this commit."""
    path = folder / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {line["name"] for line in lines if line["commit"] == commit and not line["fault"]}


@dataclass(frozen=True)
class UnderWay:
    """A run that has begun, on GPUs of its own; limit: the seconds after which it is ended."""

    run: Run
    gpus: list[str]
    process: subprocess.Popen[bytes]
    start: float
    limit: float

    @classmethod
    def begin(cls, run: Run, folder: Path, limit: float, gpus: list[str]) -> UnderWay:
        """Its output goes to a file of its own, and its children to a session that is ended with it."""
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with open(folder / "logs" / f"{run.name}.txt", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                run.arguments(folder), stdout=log, stderr=log, start_new_session=True, env=environment
            )
        return cls(run, gpus, process, time.monotonic(), limit)

    def line(self) -> dict[str, Any] | None:
        """What is told of it once it has ended or its time is over, when it is ended."""
        status, seconds = self.process.poll(), time.monotonic() - self.start
        if status is None and seconds < self.limit:
            return None
        fault = f"exit code {status}" if status else ""
        if status is None:
            self.kill()
            fault = f"not done after {self.limit:.0f} s"
        return {"name": self.run.name, "command": self.run.command, "seconds": round(seconds, 1), "fault": fault}

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Schedule:
    """Runs that wait for GPUs or are under way."""

    def __init__(self, runs: Sequence[Run], folder: Path, end: float, gpus: Sequence[str]) -> None:
        self.waiting, self.folder, self.end = list(runs), folder, end
        self.free, self.count = list(gpus), len(gpus)
        self.under_way: list[UnderWay] = []

    def why_left_out(self, run: Run) -> str:
        left = self.end - time.monotonic()
        if run.gpus > self.count:
            return f"takes {run.gpus} GPUs of {self.count}"
        return f"takes {run.seconds:.0f} s of {max(0.0, left):.0f}" if run.seconds > left else ""

    def may_begin(self, run: Run) -> bool:
        alone = run.alone or any(one.run.alone for one in self.under_way)
        return run.gpus <= len(self.free) and not (self.under_way and alone)

    def begin(self) -> list[tuple[Run, str]]:
        """Begins what may begin -> those that are left out, and why."""
        out = []
        for run in list(self.waiting):
            if reason := self.why_left_out(run):
                self.waiting.remove(run)
                out.append((run, reason))
            elif self.may_begin(run):
                self.waiting.remove(run)
                taken, self.free = self.free[: run.gpus], self.free[run.gpus :]
                limit = min(2 * run.seconds, self.end - time.monotonic())
                self.under_way.append(UnderWay.begin(run, self.folder, limit, taken))
        return out

    def ended(self) -> list[dict[str, Any]]:
        """Waits until one has ended -> the lines of those that have."""
        while True:
            found = [(one, line) for one in self.under_way if (line := one.line()) is not None]
            if found:
                break
            time.sleep(_BETWEEN_LOOKS)
        for one, _ in found:
            self.under_way.remove(one)
            self.free += one.gpus
        return [line for _, line in found]

    def kill(self) -> None:
        for one in self.under_way:
            one.kill()


def perform_all(
    runs: Sequence[Run], folder: Path, limit: float, about: Mapping[str, Any], gpus: Sequence[str] = ("",)
) -> int:
    """Runs what is not done -> how many failed or were left out."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    end, missing, before = time.monotonic() + limit, 0, done(folder, about["commit"])
    for run in runs:
        if run.name in before:
            print(f"{run.name}: done before", flush=True)
    schedule = Schedule([run for run in runs if run.name not in before], folder, end, gpus)
    try:
        while schedule.waiting or schedule.under_way:
            for run, reason in schedule.begin():
                missing += 1
                print(f"{run.name}: left out, {reason}", flush=True)
            for line in schedule.ended() if schedule.under_way else ():
                missing += bool(line["fault"])
                with open(folder / "runs.jsonl", "a", encoding="utf-8") as lines:
                    lines.write(json.dumps(line | about) + "\n")
                print(f"{line['name']}: {line['fault'] or 'done'}, {line['seconds']} s", flush=True)
    finally:
        schedule.kill()
    return missing


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name for name in asked.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


def main() -> None:
    runs = read(RUNS)
    topics = list(dict.fromkeys(run.topic for run in runs))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"{', '.join(topics)} [all]")
    parser.add_argument("--list", action="store_true", help="print the runs and what each decides, run none")
    parser.add_argument("--folder", type=Path, default=Path("measured"), help="where lines and output go [measured]")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all together [none]")
    asked = parser.parse_args()
    if unknown := [topic for topic in asked.topics if topic not in topics]:
        parser.error(f"unknown topic {unknown[0]!r}; there are {', '.join(topics)}")
    chosen = [run for run in runs if run.topic in (asked.topics or topics)]
    if asked.list:
        for run in chosen:
            gpus = f", {run.gpus} GPUs" if run.gpus > 1 else ""
            print(f"{run.topic} / {run.name} ({run.seconds:.0f} s{gpus}): {run.decides}\n    {run.command}")
        return
    gpus = visible_gpus()
    if not gpus:
        parser.error("these run on GPUs, and none is visible")
    end_on_signals()
    sys.exit(1 if perform_all(chosen, asked.folder, asked.limit, provenance(), gpus) else 0)


if __name__ == "__main__":
    main()
