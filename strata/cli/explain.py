"""`strata explain`: where the time of a workload goes, what holds it back, and what to do about it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from strata.bench.run import Setup
from strata.cli import options
from strata.cli.bench.options import AsJson, setup_options
from strata.cli.explain_output import Html, TraceFile, show
from strata.cli.groups import Values, grouped
from strata.engine.watch.request_ledger import Part, RequestLedger

if TYPE_CHECKING:
    from strata.bench.explain.measure import AnyWorkload, BenchWorkload, ServedWorkload
    from strata.plan.explain.explanation import Explanation, Subject
    from strata.plan.explain.measurement import MeasuredStep

# Options that say something of a training run.
_OF_TRAINING = frozenset({"run", "html", "trace", "as_json"})
_OF_REQUESTS = frozenset({"request", "url", "html", "trace", "as_json"})


@grouped
def explain(
    context: typer.Context,
    test: Annotated[str, typer.Argument(help="T1, T2, T3-bN (N requests), T4, or T5, a served load.")] = "T3-b8",
    *,
    setup: Annotated[
        Setup,
        setup_options(
            "model load_format dtype device deterministic tensor_parallel_size quantization kv_cache_dtype",
            model="builtin",
        ),
    ],
    changes: Annotated[
        Values,
        options.engine(
            "max_num_seqs max_num_batched_tokens num_pages enable_prefix_caching", enable_prefix_caching=False
        ),
    ],
    prompt: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="T3, T5: tokens of each prompt, 512 if left out.")
    ] = None,
    output: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="T3, T5: tokens of each output; 256, T5: 128.")
    ] = None,
    request_rate: Annotated[float | None, typer.Option(min=0.001, help="T5: requests a second, 55.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=2, max=10**4, help="T5: requests, 500.")] = None,
    tail: Annotated[bool, typer.Option(help="Explain the waits between tokens at p99 instead.")] = False,
    run: Annotated[Path | None, typer.Option(help="Instead: a training run's folder, or its TOML file.")] = None,
    request: Annotated[str | None, typer.Option(help="Instead: a server's request, by its answer's id.")] = None,
    url: Annotated[str, typer.Option(help="Of that server; its key is in STRATA_API_KEY.")] = "http://127.0.0.1:8000",
    probe: Annotated[bool, typer.Option(help="Try the best remedies on a short form of the test.")] = False,
    profile: Annotated[bool, typer.Option(help="CUDA: time kernels by the profiler, instead of predicting.")] = False,
    html: Html = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a test and explain it: from the measured time down to the floor, and the verdict.

    Of T1 to T4 that is the time of the run, of T5 the mean latency of a request.

    --run explains a training run from what its folder has, or takes a few steps of a TOML file and explains those.

    --request explains one that runs or has ended lately, by the id of its answer or its x-request-id.

    Example: strata explain T3-b16 --model builtin --device cpu --probe
    """
    if request is not None:
        _check_alone(context, "request", "a request of a server", _OF_REQUESTS)
        show(_request_explained(url, request), as_json=as_json, html=html, trace=trace)
        return
    if options.is_passed(context, "url"):
        raise ValueError("--url is of the server that has a --request: give its id too")
    if run is not None:
        _check_alone(context, "run", "a training run", _OF_TRAINING)
        show(_training(run), as_json=as_json, html=html, trace=trace)
        return
    from strata.engine.engine_config import device_of

    if profile and device_of(setup.device).type == "cpu":
        raise ValueError(
            "--profile is of CUDA, and this runs on a CPU, where operations are timed as it is: leave it out"
        )
    workload: AnyWorkload
    if test == "T5":
        workload = _served(setup, request_rate, num_prompts, prompt, output)
    elif request_rate is not None or num_prompts is not None:
        raise ValueError(f"--request-rate and --num-prompts are of T5, a served load; {test} comes at once")
    else:
        workload = _workload(setup, test, prompt, output)
    subject: Subject = "tail" if tail else "request" if test == "T5" else "run"
    found = explained(setup, workload, changes, subject=subject, probe=probe, profile=profile)
    show(found, as_json=as_json, html=html, trace=trace)


def _check_alone(context: typer.Context, option: str, what: str, known: frozenset[str]) -> None:
    """What is of tests says nothing of anything else. Raises ValueError where it was given."""
    given = (one for one in context.command.params if one.name not in known)
    for one in given:
        if options.is_passed(context, one.name or ""):
            name = one.opts[0] if one.opts[0].startswith("-") else "a test"
            raise ValueError(f"--{option} explains {what}, of which {name} says nothing; leave one of them out")


def _training(run: Path) -> Explanation:
    from strata.plan.training_explain.explain_run import explain_run
    from strata.plan.training_explain.recorded_run import read_run
    from strata.plan.training_explain.short_run import short_run
    from strata.train.config import read_train_config

    if run.is_dir():
        return explain_run(read_run(run))
    if not run.exists():
        raise ValueError(
            f"--run {run} is not there: give the folder of a run, or the TOML file of one to take steps of"
        )
    with tempfile.TemporaryDirectory() as folder:
        return explain_run(short_run(read_train_config(run), Path(folder)))


def _workload(setup: Setup, name: str, prompt: int | None, output: int | None) -> BenchWorkload:
    from strata.bench import workloads
    from strata.bench.explain.measure import BenchWorkload

    test = workloads.named(name, or_served=True)
    if prompt is None and output is None:
        _check_length(setup, name, test.longest)
        return BenchWorkload(test)
    if not name.startswith("T3-b"):
        raise ValueError(f"--prompt and --output are of T3-bN, whose requests are alike; {name} has lengths of its own")
    _check_length(setup, name, (prompt or test.prompt_lengths[0]) + (output or test.outputs[0]))
    count = len(test.prompts)
    prompts = test.prompts if prompt is None else workloads.random_prompts(count, prompt)
    return BenchWorkload(dataclasses.replace(test, prompts=prompts, outputs=(output or test.outputs[0],) * count))


def _served(
    setup: Setup, rate: float | None, requests: int | None, prompt: int | None, output: int | None
) -> ServedWorkload:
    from strata.bench.explain.measure import ServedWorkload
    from strata.bench.load.request_sets import EvenLengths
    from strata.bench.served.client import random_load
    from strata.bench.served.measure import LENGTHS, RATE, REQUESTS
    from strata.plan.meta_model import find_config

    lengths = EvenLengths(prompt or LENGTHS.prompt, output or LENGTHS.output)
    _check_length(setup, "T5", lengths.max_tokens)
    vocabulary = find_config(setup.source).vocab_size
    rate = float(RATE) if rate is None else rate
    return ServedWorkload(random_load(lengths, requests or REQUESTS, rate, 0, vocabulary))


def explained(
    setup: Setup,
    workload: AnyWorkload,
    changes: Mapping[str, Any],
    *,
    subject: Subject = "run",
    probe: bool = False,
    profile: bool = False,
) -> Explanation:
    """A test on an engine with these changes of its options."""
    from strata.bench.explain.measure import kernel_kind, measure, measured_steps
    from strata.bench.explain.predicted_steps import check_ranks, ideal_seconds, in_requested_dtype, predicted
    from strata.bench.run import engine
    from strata.plan.explain.explain import explain as explain_run
    from strata.plan.explain.split import operation_name

    check_ranks(setup)  # before ranks are started
    given = setup.llm_options() | dict(changes)
    llm = engine(given)
    times, sources = predicted(llm, setup)
    measured_steps(llm, workload.short())  # compiles and fills what the first run needs
    title = f"{setup.test_name(workload.name)} {setup.model}"
    ideal = None if workload.test is None else ideal_seconds(workload.test, times)
    on_cpu = llm.engine.device.type == "cpu"
    short = workload.short() if on_cpu or profile else None
    measured = measure(llm, workload, given, times, title=title, ideal=ideal, short=short)

    wanted = in_requested_dtype(measured.facts, llm, setup, times)
    del llm

    def tried(change: Mapping[str, Any]) -> Sequence[MeasuredStep]:
        gc.collect()  # a GPU's memory holds one engine, and ranks are of one: that before this one has ended
        return measured_steps(engine(given | dict(change)), workload.short())

    prober = tried if probe else None
    name_of = kernel_kind if profile and not on_cpu else operation_name
    return explain_run(measured, times, wanted=wanted, subject=subject, name_of=name_of, prober=prober, sources=sources)


def _check_length(setup: Setup, test: str, longest: int) -> None:
    """Raises ValueError for a model that reads too little, before prompts are drawn that no memory holds."""
    most = setup.llm_options()["max_model_len"]
    if longest > most:
        raise ValueError(
            f"{test} has sequences of up to {longest:,} tokens and {setup.model} reads {most:,}: "
            "take another --model, or T3 or T5 with a smaller --prompt and --output"
        )


class _Ledger(RequestLedger, frozen=True):
    """As a server writes it."""

    first_token: float | None = msgspec.field(name="time_to_first_token")
    first_parts: dict[Part, float] = msgspec.field(name="first_token_parts")
    beside: float = msgspec.field(name="sequences_beside")


class _Told(msgspec.Struct):
    """model, device: None of a server that does not tell them yet."""

    generations: list[_Ledger]
    model: str | None = None
    device: str | None = None


def _request_explained(url: str, id: str) -> Explanation:
    """Of several prompts in one request that which ended last. Raises ValueError if the server does not answer, or does
    not know the request."""
    from strata.plan.explain.one_request import explain_request

    if not id.strip():
        raise ValueError(
            f"--request {id!r} names none: give the id of an answer, like chatcmpl-..., or its x-request-id"
        )
    told = asyncio.run(_told(url, id))
    if not told.generations:
        raise ValueError(f"the engine of request {id} has ended, and its ledger with it")
    longest = max(told.generations, key=lambda ledger: ledger.seconds)
    return explain_request(longest, name=id, server=url, device=told.device, model=told.model)


async def _told(url: str, id: str) -> _Told:
    from strata.bench.load.connection import HttpClient
    from strata.bench.load.server import KEY_VARIABLE, fetch

    client = HttpClient(url, os.environ.get(KEY_VARIABLE))
    try:
        return await fetch(client, f"/requests/{quote(id, safe='')}", None, _Told)
    finally:
        client.close()
