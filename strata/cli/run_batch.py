"""`strata run-batch`: answers a file of requests."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.cli.serve_options import Reasoning, ServedModelName, ToolCalls, served_names, tool_format
from strata.models.folder import display_name, model_folder
from strata.serve.batch_file import BatchResults, read_requests
from strata.serve.client import EngineGone
from strata.serve.event_loop import new_event_loop
from strata.serve.http.keys import ANONYMOUS
from strata.serve.run_batch import EngineNotStarted, run_batch
from strata.serve.settings import ServeSettings
from strata.text.counted import counted

# There is one caller, who has asked for all of it: nothing is refused for being too much at once or taking too long.
_NO_BOUND = 10**9


@grouped
def run(
    requests: Annotated[Path, typer.Argument(help="A request a line, as OpenAI's batch files have them.")],
    results: Annotated[Path, typer.Argument(help="Where results go, a line each; what is there already is kept.")],
    model: options.Model = None,
    served_model_name: ServedModelName = None,
    tool_call_parser: ToolCalls = None,
    reasoning: Reasoning = False,
    *,
    engine: Annotated[
        Values,
        options.engine(
            "quantization sparsity dtype device tensor_parallel_size message_dtype pipeline_parallel_size "
            "prefill_context_parallel_size decode_context_parallel_size enable_expert_parallel enable_dp_attention "
            "load_format max_model_len max_num_seqs gpu_memory_utilization deterministic kv_cache_dtype decode_pages "
            "sparse_prefill sparse_prefill_min_keys"
        ),
    ],
) -> None:
    """Answer a file of requests, without a server; exit code 0 if all succeeded.

    Run again after it was stopped, it answers what has no result yet.

    Example: strata run-batch requests.jsonl results.jsonl
    """
    start = time.monotonic()
    folder = str(model_folder(model))
    settings = ServeSettings(
        model=folder,
        served_model_names=served_names(served_model_name, display_name(model, folder)),
        tool_format=tool_format(tool_call_parser, folder),
        reasoning=reasoning,
        max_queue=_NO_BOUND,
        request_timeout=float(_NO_BOUND),
        priority_keys=(ANONYMOUS.name,),
    )
    if results.exists() and requests.exists() and results.samefile(requests):
        raise ValueError(f"{results} holds the requests: name another file for the results")
    with BatchResults(results, read_requests(requests)) as written:
        if written.first_fault is not None:
            typer.echo(f"{requests}, {written.first_fault.message} (its result is an error)", err=True)
        stopped = _answer(requests, written, settings, {"model": folder, **engine})
    if stopped is not None:
        done = f"{written.succeeded + written.failed} of {counted(written.total, 'request')}"
        there = f"{done} have their result in {results}"
        typer.echo(f"stopped: {there}; the same command goes on", err=True)
        raise typer.Exit(128 + stopped)
    seconds = time.monotonic() - start
    summary = f"{written.succeeded} succeeded, {written.failed} failed; {seconds:.1f} s: {results}"
    typer.echo(summary, err=True)
    if written.failed:
        raise typer.Exit(1)


def _answer(requests: Path, results: BatchResults, settings: ServeSettings, engine: Mapping[str, Any]) -> int | None:
    """What is left to be answered, with a bar on a terminal. Returns the signal that has stopped it, if one has."""
    if results.succeeded + results.failed == results.total:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("requests", total=results.total)

    def done() -> None:
        progress.update(task, advance=1, description=f"{results.failed} failed" if results.failed else "requests")

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_until_signal(run_batch(requests, results, settings, engine, progress.start, done)))
    except EngineNotStarted:
        raise typer.Exit(1) from None
    except EngineGone as error:
        raise ValueError(f"{error}; the same command goes on where this one has stopped") from None
    finally:
        progress.stop()


async def _until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    """Await `work`, or cancel it at Ctrl-C and SIGTERM. Returns the signal, None if none has come."""
    signals: list[int] = []
    working = asyncio.ensure_future(work)

    def note_signal(number: int) -> None:
        signals.append(number)
        working.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, note_signal, number)
    await asyncio.wait((working,))
    if signals and working.cancelled():
        return signals[0]
    working.result()
    return None
