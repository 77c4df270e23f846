"""`strata run-batch`: answers a file of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata.cli import options
from strata.cli.serve import BUILTIN_MODEL, TOOL_FORMATS, ToolCallParser
from strata.serve.batch_file import BatchResults, read_requests
from strata.serve.client import EngineGone
from strata.serve.run_batch import run_batch
from strata.serve.settings import ServeSettings

# There is one caller, who has asked for all of it: nothing is refused for being too much at once or taking too long.
_NO_BOUND = 10**9


def run(
    requests: Annotated[Path, typer.Argument(help="A request a line, as OpenAI's batch files have them.")],
    results: Annotated[Path, typer.Argument(help="Where results go, a line each; what is there already is kept.")],
    model: options.Model = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests may call it; may be repeated. [default: the folder's name]")
    ] = None,
    tool_call_parser: Annotated[ToolCallParser | None, typer.Option(help="How the model calls tools.")] = None,
    reasoning: Annotated[bool, typer.Option(help="Tell <think>...</think> apart from the answer.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use, in (0, 1].")] = 0.9,
    deterministic: options.Deterministic = False,
) -> None:
    """Answer a file of requests, without a server; exit code 0 if all succeeded.

    Run again after it was stopped, it answers what has no result yet.

    Example: strata run-batch requests.jsonl results.jsonl
    """
    start = time.monotonic()
    folder = str(model if model is not None else BUILTIN_MODEL)
    settings = ServeSettings(
        model=folder,
        served_model_names=tuple(served_model_name or [Path(folder).resolve().name]),
        tool_format=None if tool_call_parser is None else TOOL_FORMATS[tool_call_parser],
        reasoning=reasoning,
        max_queue=_NO_BOUND,
        request_timeout=float(_NO_BOUND),
    )
    engine = {
        "model": folder,
        "dtype": dtype,
        "device": device,
        "load_format": load_format,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "deterministic": deterministic,
    }
    if results.exists() and results.samefile(requests):
        raise ValueError(f"{results} holds the requests: name another file for the results")
    with BatchResults(results) as written:
        _answer(requests, written, settings, engine)
    seconds = time.monotonic() - start
    told = f"{written.succeeded} succeeded, {written.failed} failed; {seconds:.1f} s: {results}"
    typer.echo(told, err=True)
    if written.failed:
        raise typer.Exit(1)


def _answer(requests: Path, results: BatchResults, settings: ServeSettings, engine: Mapping[str, Any]) -> None:
    """What is left to be answered, with a bar on standard error."""
    lines = [request in results for request in read_requests(requests)]
    if all(lines):
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=len(lines))

        def done() -> None:
            progress.update(task, advance=1, description=f"{results.failed} failed" if results.failed else "requests")

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run_batch(requests, results, settings, engine, done))
        except EngineGone as error:
            raise ValueError(f"{error}; the same command goes on where this one has stopped") from None
