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
try:
    for test in [workloads.named(line.strip()) for line in sys.stdin]:
        if llm is None:
            llm = started(Setup(sys.argv[1], None, "bfloat16", "auto", False), test)
            call(llm, test, WARMUP_TOKENS)
        print(json.dumps({"test": test.name, "value": test.value(call(llm, test)), "unit": test.unit}), flush=True)
except ValueError as error:
    sys.exit(f"strata: error: {error}")
"""


def calls(model: str, tests: list[str], repeat: int, checkout: Path) -> Iterator[dict[str, Any]]:
    """What each call of a fresh process on a checkout took. Ends the program if that process fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    asked = "".join(f"{test}\n" * repeat for test in tests)
    command = [sys.executable, "-c", RUNS, model]
    # Not in a checkout, which Python would prefer to the one that is asked for.
    run = subprocess.run(command, input=asked, env=environment, cwd="/", stdout=subprocess.PIPE, text=True)
    yield from map(json.loads, run.stdout.splitlines())
    if run.returncode != 0:
        sys.exit(f"{checkout} failed with exit code {run.returncode}: {','.join(tests)} of {model}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a shape, a checkpoint folder or builtin")
    parser.add_argument("tests", help="T1, T2, T3-bN (N requests) and T4, between commas")
    parser.add_argument("checkouts", nargs="+", metavar="NAME=FOLDER", help="what to call it, and its root folder")
    parser.add_argument("--turns", type=int, default=2, help="of each checkout [2]")
    parser.add_argument("--calls", type=int, default=3, help="of each test in a turn [3]")
    asked = parser.parse_args()
    checkouts = {}
    for one in asked.checkouts:
        name, _, folder = one.partition("=")
        if not folder or not Path(folder, "strata", "bench").is_dir():
            parser.error(f"{one} is no checkout of Strata; give NAME=FOLDER")
        checkouts[name] = Path(folder).resolve()
    model = str(Path(asked.model).resolve()) if Path(asked.model).is_dir() else asked.model
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    units = {}
    for turn in range(asked.turns):
        for name in list(checkouts)[:: -1 if turn % 2 else 1]:
            for line in calls(model, asked.tests.split(","), asked.calls, checkouts[name]):
                print(json.dumps(line | {"checkout": name, "turn": turn}), flush=True)
                found[line["test"]][name].append(line["value"])
                units[line["test"]] = line["unit"]
    for test, values in found.items():
        best = {name: (min if units[test] == "ms" else max)(figures) for name, figures in values.items()}
        print(json.dumps({"test": test, "model": asked.model, "unit": units[test], "best": best}))


if __name__ == "__main__":
    main()
