"""Inference tests on several checkouts in turns, on one machine: whether a change made any of them slower.

Usage: python benchmarks/in_turns.py 0.6B T1,T2,T3-b32 before=../old after=. [--turns 2] [--calls 3]

Each checkout runs in a process of its own, one at a time, every other turn in the opposite order, and the best call of
all turns counts. Prints a JSON object a line: each call, then of each test the best of each checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = """
import json, sys
from strata.bench import workloads
from strata.bench.run import WARMUP_TOKENS, Setup, call, started

llm = None
for line in sys.stdin:
    test = workloads.named(line.strip())
    if llm is None:
        llm = started(Setup(sys.argv[1], None, "bfloat16", "auto", False), test)
        call(llm, test, WARMUP_TOKENS)
    print(json.dumps({"test": test.name, "value": test.value(call(llm, test)), "unit": test.unit}), flush=True)
"""


def calls(model: str, tests: list[str], repeat: int, checkout: Path) -> Iterator[dict[str, Any]]:
    """What each call of a fresh process on a checkout took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    asked = "".join(f"{test}\n" * repeat for test in tests)
    command = [sys.executable, "-c", RUNS, model]
    # Not in a checkout, which Python would prefer to the one that is asked for.
    run = subprocess.run(command, input=asked, env=environment, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    yield from map(json.loads, run.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a shape or a checkpoint folder")
    parser.add_argument("tests", help="T1 to T4, between commas")
    parser.add_argument("checkouts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--calls", type=int, default=3, help="of each test in a turn")
    asked = parser.parse_args()
    checkouts = {name: Path(folder).resolve() for name, _, folder in (one.partition("=") for one in asked.checkouts)}
    for name, folder in checkouts.items():
        if not (folder / "strata" / "bench").is_dir():
            parser.error(f"{name}={folder} is no checkout of Strata; give NAME=FOLDER")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    units = {}
    for turn in range(asked.turns):
        for name in list(checkouts)[:: -1 if turn % 2 else 1]:
            for line in calls(asked.model, asked.tests.split(","), asked.calls, checkouts[name]):
                print(json.dumps(line | {"checkout": name, "turn": turn}), flush=True)
                found[line["test"]][name].append(line["value"])
                units[line["test"]] = line["unit"]
    for test, values in found.items():
        best = {name: (min if units[test] == "ms" else max)(figures) for name, figures in values.items()}
        print(json.dumps({"test": test, "model": asked.model, "unit": units[test], "best": best}))


if __name__ == "__main__":
    main()
