"""Plants each bottleneck, lets `strata explain` name it, and mends it: is the promised gain what mending brings?

    OMP_NUM_THREADS=1 python -m benchmarks.planted --repeat 3 --save planted.jsonl

On a CPU all but CPU contention goes by the time that the engine's thread had a processor, so that other work on the
machine hardly counts. The fault and its absence are measured in turns, and the fastest run of each counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.engines import write_model
from benchmarks.planted.cases import CASES, Case
from strata.bench.explain.measure import BenchWorkload, measure, measured_steps
from strata.bench.explain.predicted_steps import ideal_seconds, in_requested_dtype, predicted
from strata.bench.result import provenance
from strata.bench.run import Setup, engine
from strata.cost.step_model import StepModel
from strata.engine.llm import LLM
from strata.hardware.machine import cpu_name
from strata.models.shapes import SHAPES
from strata.plan.explain.explain import explain
from strata.plan.explain.explanation import Explanation
from strata.plan.explain.measurement import MeasuredStep, Measurement

NEAR = 0.25  # of the actual gain
# KV pages of each engine: several share a device, of which one alone would take nearly all; 7 GiB of 0.6B.
_PAGES = 4096


@dataclasses.dataclass(frozen=True)
class Outcome:
    """predicted: by the first remedy. actual: of mending it. unexplained: of the measured time. seconds: of the run
    with the fault and without."""

    case: str
    named: bool
    verdict: str
    predicted: float
    actual: float
    unexplained: float
    faulty: float
    mended: float

    @property
    def near(self) -> bool:
        return abs(self.predicted - self.actual) <= NEAR * abs(self.actual)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run and what is told of it without trying anything."""

    measured: Measurement
    explanation: Explanation
    times: StepModel
    wanted: StepModel | None
    sources: Sequence[str]


class Bench:
    """Engines for a case, and its runs. folder: where a shape, which has no tokenizer, gets one."""

    def __init__(self, case: Case, setup: Setup, folder: Path) -> None:
        self.case, self.setup = case, setup
        base = setup.llm_options() | {"skip_tokenizer_init": not case.texts, "num_pages": _PAGES}
        if case.texts and setup.model in SHAPES:
            base["model"] = str(write_model(folder, setup.model))
        self.asked = base | {name: value for name, value in case.options.items() if name != "dtype"}
        self.faulty = base | dict(case.options)
        changed = {name: base[name] for name in case.options if name in base}
        self.mended = base | changed | dict(case.mended)

    def make(self, options: Mapping[str, Any], *, faulty: bool) -> LLM:
        if not faulty:
            return self._timed(engine(options))
        with self.case.around():
            return self._timed(engine(options))

    def _timed(self, llm: LLM) -> LLM:
        if llm.engine.device.type == "cpu" and not self.case.by_wall:
            llm.engine.loop.clock = time.thread_time
        return llm

    def workload(self, llm: LLM, *, faulty: bool = True) -> BenchWorkload:
        chosen = self.case.workload
        if not faulty and self.case.mended_workload is not None:
            chosen = self.case.mended_workload
        if not self.case.texts:
            return chosen
        vocabulary, tokenizer = llm.engine.config.vocab_size, llm.get_tokenizer()
        texts = tuple(tokenizer.decode([id % vocabulary for id in prompt]) for prompt in chosen.test.prompts)
        return dataclasses.replace(chosen, texts=texts)

    def measured(self, llm: LLM, *, faulty: bool) -> Run:
        workload = self.workload(llm, faulty=faulty)
        options = self.asked if faulty else self.mended
        times, sources = predicted(llm, self.setup)
        with self.case.during(llm) if faulty else nullcontext():
            measured_steps(llm, workload.short())
            short = workload.short() if llm.engine.device.type == "cpu" else None
            ideal = ideal_seconds(workload.test, times)
            found = measure(llm, workload, options, times, title=self.case.name, ideal=ideal, short=short)
        wanted = in_requested_dtype(found.facts, llm, self.setup, times)
        return Run(found, explain(found, times, wanted=wanted, subject=self.case.subject), times, wanted, sources)

    def probed(self, run: Run, workload: BenchWorkload) -> Explanation:
        """With the remedies that promise most tried."""

        def tried(change: Mapping[str, Any]) -> Sequence[MeasuredStep]:
            made = self._timed(engine(self.asked | dict(change)))
            short = workload.short()
            measured_steps(made, short)
            return measured_steps(made, short)

        given = {"wanted": run.wanted, "subject": self.case.subject, "sources": run.sources}
        return explain(run.measured, run.times, prober=tried, **given)


def outcome(case: Case, setup: Setup, repeat: int) -> Outcome:
    """What came of a case."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(Bench(case, setup, Path(folder)), repeat)


def _outcome(bench: Bench, repeat: int) -> Outcome:
    case = bench.case
    mended_engine = None if case.lasts else bench.make(bench.mended, faulty=False)
    found, mended = [], []
    with case.around() if case.lasts else nullcontext():
        faulty = bench.make(bench.faulty, faulty=not case.lasts)
        for _ in range(repeat):
            found.append(bench.measured(faulty, faulty=True))
            if mended_engine is not None:
                mended.append(bench.measured(mended_engine, faulty=False))
        fastest = min(found, key=lambda run: run.explanation.waterfall.measured)
        explained = bench.probed(fastest, bench.workload(faulty))
    if mended_engine is None:  # what is beside the process would be beside this one as well
        mended_engine = bench.make(bench.mended, faulty=False)
        mended = [bench.measured(mended_engine, faulty=False) for _ in range(repeat)]
    fall, verdict = explained.waterfall, explained.verdict
    after = min(run.explanation.waterfall.measured for run in mended)
    return Outcome(
        case.name,
        case.symptom in verdict.symptom,
        verdict.line,
        verdict.remedies[0].gain if verdict.remedies else 0.0,
        1 - after / fall.measured,
        fall.unexplained / fall.measured,
        fall.measured,
        after,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="cases whose names hold one of these words between commas")
    parser.add_argument("--save", type=Path, help="append a line of JSON for each case")
    given = parser.parse_args()
    on_cuda = given.device != "cpu" and torch.cuda.is_available()
    setup = Setup(given.model, None, "bfloat16", "cuda" if on_cuda else "cpu", False)
    name = torch.cuda.get_device_name() if on_cuda else cpu_name()
    print(f"{'case':36}{'named':>6}{'promised':>10}{'brought':>9}{'near':>6}{'unexplained':>13}  verdict")
    command = {"command": shlex.join(["python", "-m", "benchmarks.planted", *sys.argv[1:]])}
    failed = 0
    for case in CASES:
        if given.only and not any(words in case.name for words in given.only.split(",")):
            continue
        if case.needs_cuda and not on_cuda:
            print(f"{case.name:36}not run: it needs a CUDA device")
            continue
        try:
            found = outcome(case, setup, given.repeat)
        except Exception:  # the other cases can still tell something
            failed += 1
            print(f"{case.name:36}failed:\n{traceback.format_exc()}", flush=True)
            continue
        finally:
            gc.collect()  # engines refer to themselves, and the next case's have to find room
        print(
            f"{found.case:36}{'yes' if found.named else 'NO':>6}{found.predicted:>10.1%}{found.actual:>9.1%}"
            f"{'yes' if found.near else 'NO':>6}{found.unexplained:>13.2%}  {found.verdict}",
            flush=True,
        )
        if given.save is not None:
            line = dataclasses.asdict(found) | {"near": found.near, "device": name, "model": given.model}
            with given.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | provenance() | command) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
