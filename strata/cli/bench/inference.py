"""`strata bench`: the inference tests T0 to T4, each figure beside its floor; the others have files of their own."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import strata
from strata.bench import workloads
from strata.bench.result import make_result
from strata.bench.run import Setup, call, device_name, floor_on, started
from strata.bench.workloads import InferenceTest
from strata.cli.bench.options import Repeat, Report, ReportOptions, setup_options
from strata.cli.groups import grouped
from strata.cli.lazy import lazy_group

if TYPE_CHECKING:
    from strata.engine.llm import LLM

_PLACES = {
    "comm": "strata.cli.bench.comm:comm",
    "faults": "benchmarks.faults.command:faults",
    "gaps": "strata.cli.bench.gaps:gaps",
    "kernels": "benchmarks.kernels.command:kernels",
    "parallel": "benchmarks.parallel.command:parallel",
    "predictions": "benchmarks.predictions.command:predictions",
    "serve": "strata.cli.bench.serve:serve",
    "train": "benchmarks.training.command:train",
    "throughput": "strata.cli.bench.inference:throughput",
    "latency": "strata.cli.bench.inference:latency",
    "prefill": "strata.cli.bench.inference:prefill",
    "startup": "strata.cli.bench.inference:startup",
}


def _places_here() -> dict[str, str]:
    """Without those that measure Strata itself where the package is installed alone: they are in its repository."""
    root = Path(strata.__file__).parents[1]
    if not (root / "benchmarks" / "kernels").is_dir():
        return {name: place for name, place in _PLACES.items() if place.startswith("strata.")}
    if str(root) not in sys.path:  # of processes, too, that are spawned to compile and find it by its name
        sys.path.append(str(root))
    return _PLACES


bench = typer.Typer(cls=lazy_group(_places_here()), add_completion=False, no_args_is_help=True)


@bench.callback()
def start() -> None:
    """Measure inference, training and operations: T0 to T8 of benchmarks/README.md.

    Example: strata bench throughput --model 8B
    """


Tested = Annotated[
    Setup,
    setup_options(
        "model load_format quantization sparsity passes dtype device deterministic tensor_parallel_size "
        "pipeline_parallel_size enable_expert_parallel executor message_dtype"
    ),
]


@grouped
def throughput(
    batch: Annotated[int | None, typer.Option(min=1, help="T3: so many equal requests; T1 if left out.")] = None,
    *,
    setup: Tested,
    repeat: Repeat = 3,
    to: Report,
) -> None:
    """T1: output tokens per second of 256 uneven requests; with --batch N, T3: of N requests of prompt 512, output 256.

    Example: strata bench throughput --model 8B --batch 32 --save results.jsonl
    """
    _run(workloads.offline() if batch is None else workloads.fixed_batch(batch), setup, repeat, to)


@grouped
def latency(*, setup: Tested, repeat: Repeat = 3, to: Report) -> None:
    """T2: milliseconds per output token of one greedy request, prompt 128, output 512.

    Example: strata bench latency --model 8B
    """
    _run(workloads.single(), setup, repeat, to)


@grouped
def prefill(*, setup: Tested, repeat: Repeat = 3, to: Report) -> None:
    """T4: prompt tokens per second of 16 prompts of 2048 tokens.

    Example: strata bench prefill --model 8B --json
    """
    _run(workloads.prefill(), setup, repeat, to)


@grouped
def startup(*, setup: Tested, repeat: Repeat = 3, to: Report) -> None:
    """T0: seconds from the start of a process to its first token, each repetition a new process.

    Example: strata bench startup --model 0.6B
    """
    seconds, name = [], ""
    for _ in range(repeat):
        taken, name = first_token(setup.llm_options())
        seconds.append(taken)
    result = make_result(setup.test_name("T0"), setup.model, setup.dtype, seconds, "s", name)
    to.report(result.values(), result.text())


def _run(test: InferenceTest, setup: Setup, repeat: int, to: ReportOptions) -> None:
    """Start an engine, warm it up, and time `repeat` calls of the whole test; on CUDA, one more measures host gaps, and
    everywhere one more what the verdict needs."""
    llm = started(setup, test)
    values = [test.value(call(llm, test)) for _ in range(repeat)]
    host_gap = None
    if llm.engine.device.type == "cuda":
        from strata.bench.step_observers import time_steps

        host_gap = time_steps(llm, test).host_gap
    name = device_name(llm)
    seconds = floor_on(test, setup, name)
    floor = None if seconds is None else test.value(seconds)
    tested = setup.test_name(test.name)
    result = make_result(tested, setup.model, setup.dtype, values, test.unit, name, floor, host_gap)
    result = dataclasses.replace(result, verdict=_verdict_line(llm, test, setup))
    to.report(result.values(), result.text())


def first_token(llm_options: dict[str, Any]) -> tuple[float, str]:
    """Seconds until a new process has generated its first token, and the name of its device.

    If the process ends without one, this one ends with its exit code: its own error stands above. Raises ValueError if
    it was killed.
    """
    command = [sys.executable, "-m", "strata.cli.first_token", json.dumps(llm_options)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
        except KeyboardInterrupt:
            process.kill()
            raise
        seconds = time.perf_counter() - start
    if process.returncode < 0:
        raise ValueError(
            f"the engine's process was killed by {signal.Signals(-process.returncode).name}; where the system has run "
            "out of memory, take a smaller model"
        )
    if process.returncode:
        raise typer.Exit(process.returncode)
    return seconds, str(json.loads(line)["device"])


def _verdict_line(llm: LLM, test: InferenceTest, setup: Setup) -> str | None:
    """By one more run of the test. None where nothing tells what steps should take: of a GPU that is not in the
    database, of ranks on a processor, and of stages of a pipeline, whose steps overlap."""
    from strata.bench.explain.measure import BenchWorkload, measure
    from strata.bench.explain.predicted_steps import ideal_seconds, in_requested_dtype, predicted
    from strata.plan.explain.explain import explain

    if setup.pipeline_parallel_size > 1:
        return None
    try:
        times, _ = predicted(llm, setup)
    except ValueError:
        return None
    workload, options = BenchWorkload(test), setup.llm_options()
    short = workload.short() if llm.engine.device.type == "cpu" else None
    ideal = ideal_seconds(test, times)
    measured = measure(llm, workload, options, times, title=test.name, ideal=ideal, short=short)
    return explain(measured, times, wanted=in_requested_dtype(measured.facts, llm, setup, times)).verdict.line
