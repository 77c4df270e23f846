"""`strata bench`: the inference tests T0 to T4, each figure beside its floor; the others have files of their own."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.bench import workloads
from strata.bench.result import Result, make_result
from strata.bench.run import Setup, call, device_name, floor_on, started
from strata.bench.workloads import InferenceTest
from strata.cli.bench.comm import comm
from strata.cli.bench.faults import faults
from strata.cli.bench.gaps import gaps
from strata.cli.bench.kernels import kernels
from strata.cli.bench.options import Repeat, Report, setup_options
from strata.cli.bench.parallel import parallel
from strata.cli.bench.predictions import predictions
from strata.cli.bench.serve import serve
from strata.cli.bench.train import train
from strata.cli.groups import grouped
from strata.cli.help import Command

if TYPE_CHECKING:
    from strata.engine.llm import LLM

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="""Measure inference, training and operations: T0 to T8 of benchmarks/README.md.

    Example: strata bench throughput --model 8B
    """,
)


for _one in (comm, faults, gaps, kernels, parallel, predictions, serve, train):
    bench.command(cls=Command)(_one)
_SETUP = setup_options(
    "model load_format quantization sparsity passes dtype device deterministic tensor_parallel_size "
    "pipeline_parallel_size enable_expert_parallel executor message_dtype"
)


@bench.command(cls=Command)
@grouped
def throughput(
    batch: Annotated[int | None, typer.Option(min=1, help="T3: so many equal requests; T1 if left out.")] = None,
    *,
    setup: Annotated[Setup, _SETUP],
    repeat: Repeat = 3,
    to: Report,
) -> None:
    """T1: output tokens per second of 256 uneven requests; with --batch N, T3: of N requests of prompt 512, output 256.

    Example: strata bench throughput --model 8B --batch 32 --save results.jsonl
    """
    result = run(workloads.offline() if batch is None else workloads.fixed_batch(batch), setup, repeat)
    to.report(result.values(), result.text())


def _command(name: str, measure: Callable[[Setup, int], Result], help: str) -> None:
    """Make a test a command: it gets what engine it is of, and how often to repeat it."""

    @bench.command(name, cls=Command, help=help)
    @grouped
    def command(*, setup: Annotated[Setup, _SETUP], repeat: Repeat = 3, to: Report) -> None:
        result = measure(setup, repeat)
        to.report(result.values(), result.text())


def run(test: workloads.InferenceTest, setup: Setup, repeat: int) -> Result:
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
    return dataclasses.replace(result, verdict=_verdict_line(llm, test, setup))


def start_up(setup: Setup, repeat: int) -> Result:
    """Time `repeat` new processes from their start to their first token."""
    seconds, name = [], ""
    for _ in range(repeat):
        taken, name = first_token(setup.llm_options())
        seconds.append(taken)
    return make_result(setup.test_name("T0"), setup.model, setup.dtype, seconds, "s", name)


_command(
    "latency",
    lambda setup, repeat: run(workloads.single(), setup, repeat),
    """T2: milliseconds per output token of one greedy request, prompt 128, output 512.

    Example: strata bench latency --model 8B
    """,
)
_command(
    "prefill",
    lambda setup, repeat: run(workloads.prefill(), setup, repeat),
    """T4: prompt tokens per second of 16 prompts of 2048 tokens.

    Example: strata bench prefill --model 8B --json
    """,
)
_command(
    "startup",
    start_up,
    """T0: seconds from the start of a process to its first token, each repetition a new process.

    Example: strata bench startup --model 0.6B
    """,
)


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
