"""Repeats what the documents' figures were measured with, on this machine: the commands of figures.toml, one by one.

    python -m benchmarks.figures --list
    python -m benchmarks.figures precision sparsity --folder measured --limit 560

FOLDER gets the lines that the commands save, under the names that they have in benchmarks/results, their output
(log.txt), and a line for each run (runs.jsonl). A run that is expected to take longer than what is left of the limit is
left out; the same call goes on with it, and with those that failed, until another commit is checked out.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.bench.result import provenance

RUNS = Path(__file__).with_name("figures.toml")


@dataclass(frozen=True)
class Run:
    """A command and what it is for.

    seconds: that it is expected to take on an H200; it is ended after twice as many. results: the file that it saves
    lines to, empty if it saves none. decides: the figure that is asked of it.
    """

    name: str
    topic: str
    command: str
    seconds: float
    decides: str
    results: str = ""

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


def perform(run: Run, folder: Path, limit: float) -> dict[str, Any]:
    """Runs it for so many seconds at most, its output at the end of log.txt -> its line."""
    start = time.monotonic()
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        print(f"\n=== {run.name}: {run.command}", file=log, flush=True)
        process = subprocess.Popen(run.arguments(folder), stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(timeout=limit)
            fault = f"exit code {status}" if status else ""
        except subprocess.TimeoutExpired:
            fault = f"not done after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"name": run.name, "command": run.command, "seconds": round(time.monotonic() - start, 1), "fault": fault}


def perform_all(runs: Iterable[Run], folder: Path, limit: float, about: Mapping[str, Any]) -> int:
    """Runs what is not done -> how many failed or were left out."""
    folder.mkdir(parents=True, exist_ok=True)
    end, missing, before = time.monotonic() + limit, 0, done(folder, about["commit"])
    for run in runs:
        left = end - time.monotonic()
        if run.name in before:
            print(f"{run.name}: done before", flush=True)
        elif run.seconds > left:
            missing += 1
            print(f"{run.name}: left out, takes {run.seconds:.0f} s of {max(0.0, left):.0f}", flush=True)
        else:
            line = perform(run, folder, min(2 * run.seconds, left))
            missing += bool(line["fault"])
            with open(folder / "runs.jsonl", "a", encoding="utf-8") as lines:
                lines.write(json.dumps(line | about) + "\n")
            print(f"{run.name}: {line['fault'] or 'done'}, {line['seconds']} s", flush=True)
    return missing


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
            print(f"{run.topic} / {run.name} ({run.seconds:.0f} s): {run.decides}\n    {run.command}")
        return
    sys.exit(1 if perform_all(chosen, asked.folder, asked.limit, provenance()) else 0)


if __name__ == "__main__":
    main()
