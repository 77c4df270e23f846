"""What it costs a run to be explained: `strata explain` notes every step, and the same run goes unnoted in turns.

    python -m benchmarks.plan.observed_steps --model 0.6B --tests T2,T3-b32,T4 --repeat 5 --save observed.jsonl

A turn is a run without and a run with, every other turn in the opposite order. The median of each counts, and the line
says how far the runs of one kind lie apart, since no less can be told from them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

from strata.bench import workloads
from strata.bench.explain.measure import BenchWorkload, measure
from strata.bench.explain.predicted_steps import predicted
from strata.bench.result import provenance
from strata.bench.run import Setup, call, device_name, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tests", default="T2,T3-b8", help="T1, T2, T3-bN and T4, between commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each test [5]")
    parser.add_argument("--save", type=Path, help="append a line of JSON for each test")
    asked = parser.parse_args()
    if asked.repeat < 2:
        parser.error(f"--repeat {asked.repeat}: one turn does not tell how far two runs lie apart; 2 or more")
    setup = Setup(asked.model, None, "bfloat16", asked.device, deterministic=False)
    options = setup.llm_options()
    llm = engine(options)
    times, _ = predicted(llm, setup)
    about = {"device": device_name(llm)} | provenance()
    about |= {"command": shlex.join(["python", "-m", "benchmarks.plan.observed_steps", *sys.argv[1:]])}
    for test in map(workloads.named, asked.tests.split(",")):
        call(llm, test)  # what its sizes compile
        plain: list[float] = []
        observed: list[float] = []

        def noted(test: workloads.InferenceTest = test) -> float:
            return measure(llm, BenchWorkload(test), options, times, title=test.name).wall

        def unnoted(test: workloads.InferenceTest = test) -> float:
            llm.engine.loop.scheduler.reset()  # as `measure` does: nothing is cached
            return call(llm, test)

        for turn in range(asked.repeat):
            kinds = [(plain, unnoted), (observed, noted)]
            for seconds, run in kinds if turn % 2 == 0 else reversed(kinds):
                seconds.append(run())
        without, with_notes = statistics.median(plain), statistics.median(observed)
        apart = (max(plain) - min(plain)) / without
        line = {"test": "observed steps", "model": asked.model, "run": test.name, "seconds": without}
        line |= {"noted_seconds": with_notes, "cost": with_notes / without - 1, "apart": apart, "turns": asked.repeat}
        print(
            f"{test.name:8} {without:9.4f} s, noted {with_notes:9.4f} s: {with_notes / without - 1:+.2%} "
            f"(runs without lie {apart:.2%} apart)",
            flush=True,
        )
        if asked.save is not None:
            with asked.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | about) + "\n")


if __name__ == "__main__":
    main()
