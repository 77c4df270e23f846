"""T1 to T4 on Strata and on vLLM in turns on this machine, into one results file.

    python -m benchmarks.peers.offline_in_turns --strata-python .venv/bin/python --vllm-python .vllm/bin/python \\
        --save benchmarks/results/h200_peers.jsonl

Each turn of an engine is a process of its own (`offline.py`), with its own Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.peers import engines, offline
from benchmarks.peers.processes import EngineFailed, EngineProcess, end_on_signals


def run_turns(asked: argparse.Namespace) -> None:
    """All turns of all models. Raises EngineFailed at the first process that fails."""
    run = engines.now()
    pythons = engines.pythons(asked)
    for model in asked.models:
        for turn in range(asked.turns):
            for engine in engines.order(turn):
                print(f"{model}, turn {turn + 1} of {asked.turns}: {engines.NAMES[engine]}", flush=True)
                command = [pythons[engine], "-m", "benchmarks.peers.offline", "--engine", engine, "--model", model]
                command += ["--tests", ",".join(asked.tests), "--repeat", str(asked.repeat)]
                command += ["--tensor-parallel-size", str(asked.tensor_parallel_size)]
                if asked.weights is not None:
                    command += ["--weights", str(asked.weights)]
                command += ["--save", str(asked.save), "--run", run, "--turn", str(turn)]
                with EngineProcess(engines.NAMES[engine], command, engines.ROOT) as process:
                    process.wait(asked.turn_timeout)
                missing = set(asked.tests) - saved_tests(asked.save, run, turn, engine)
                if missing:
                    names = ", ".join(sorted(missing))
                    raise EngineFailed(
                        f"{engines.NAMES[engine]} ended without results of {names}; its output stands above"
                    )


def saved_tests(file: Path, run: str, turn: int, engine: str) -> set[str]:
    """Names of the tests of which a turn of an engine has saved results, into a file that others save to as well."""
    lines = (json.loads(text) for text in file.read_text(encoding="utf-8").splitlines())
    mine = {"run": run, "turn": turn, "engine": engine}
    return {line["test"] for line in lines if mine.items() <= line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_options(parser)
    offline.add_options(parser)
    engines.add_weights(parser)
    parser.add_argument("--turn-timeout", type=engines.seconds, default=3600.0, help="in which a turn is done [3600]")
    asked = parser.parse_args()
    engines.require_pythons(parser, asked, engines.ENGINES)
    engines.refuse_other_weights(parser, asked.weights, asked.models)
    end_on_signals()
    try:
        run_turns(asked)
    except EngineFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
