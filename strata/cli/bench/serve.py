"""`strata bench serve`: load on a running server, and the latencies, throughput and goodput under it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from strata.bench.load.connection import HttpClient
from strata.bench.load.plot import plot_latency, plottable
from strata.bench.load.report import LoadResult, report_console, sweep_table
from strata.bench.load.send import run
from strata.bench.load.server import KEY_VARIABLE
from strata.bench.load.sessions import SessionShape
from strata.bench.load.sweep import AGENTS, LoadConfig, measure
from strata.bench.result import writable
from strata.cli.bench import load_options
from strata.cli.bench.options import AsJson, Save


def _picture(file: Path | None) -> Path | None:
    return None if file is None else writable(plottable(file))


def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help=f"Where the server is; its key is read from {KEY_VARIABLE}.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str | None, typer.Option(help="Name of the model; the server's first if left out.")] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="completions sends token ids, chat sends text.")
    ] = "completions",
    dataset: Annotated[
        str,
        typer.Option(
            help="random, shared-prefix, lognormal (lengths as people's), agents (sessions whose turns go on from the "
            "answers), or a JSON-lines file of prompt, messages or input_length, and output_length."
        ),
    ] = "random",
    num_prompts: load_options.NumPrompts = None,
    input_len: load_options.InputLen = 512,
    output_len: load_options.OutputLen = 128,
    length_spread: load_options.LengthSpread = 0.0,
    longest: load_options.Longest = 2048,
    prefix_len: load_options.PrefixLen = 1024,
    prefix_groups: load_options.PrefixGroups = 8,
    sessions: load_options.Sessions = 64,
    turns: load_options.Turns = 20,
    turn_input: load_options.TurnInput = "300-2000",
    turn_output: load_options.TurnOutput = "100-400",
    pause: load_options.Pause = "0-5",
    context_len: load_options.ContextLen = 32_768,
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, inf, or percent of a saturation measured first; several: 25%,50%.")
    ] = "inf",
    burstiness: load_options.Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests under way; for rates in percent, while saturation is measured (256 if left out)."
        ),
    ] = None,
    replay: load_options.Replay = False,
    goodput: load_options.Goodput = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request is given up.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts and arrivals.")] = 0,
    as_json: AsJson = False,
    save: Save = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw latency against load into this SVG or PNG.", callback=_picture)
    ] = None,
) -> None:
    """T5: latency, throughput and goodput of a running server under load. Exit code 1 if any request was lost.

    Example: strata bench serve --request-rate 25%,50%,75%,90% --goodput 'ttft:200 tpot:15' --plot load.svg
    """
    if plot is not None and (replay or set(request_rate.replace(",", " ").split()) == {"inf"}):
        raise ValueError("--plot draws latency against --request-rate: give it finite rates (such as 25%,50%,75%,90%)")
    load_options.check_used(context, dataset, request_rate)
    shape = None
    if dataset == AGENTS:
        new = load_options.parse_span("turn-input", turn_input, int, 1)
        output = load_options.parse_span("turn-output", turn_output, int, 1)
        pauses = load_options.parse_span("pause", pause, float, 0)
        shape = SessionShape(sessions, turns, new, output, pauses, context_len)
    config = load_options.load_config(
        dataset=dataset,
        chat=endpoint == "chat",
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        length_spread=length_spread,
        longest=longest,
        prefix_len=prefix_len,
        prefix_groups=prefix_groups,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        replay=replay,
        goodput=goodput,
        timeout=timeout,
        seed=seed,
        sessions=shape,
    )
    results = measure_server(url, model, config, as_json=as_json, save=save)
    if plot is not None:
        plot_latency([result.values() for result in results], plot)
    if any(result.figures.lost for result in results):
        raise typer.Exit(1)


def measure_server(
    url: str, model: str | None, config: LoadConfig, *, as_json: bool, save: Path | None
) -> list[LoadResult]:
    """Run the loads of a config and print (and append to `save`) each result as it comes."""
    console = report_console()

    def show(result: LoadResult) -> None:
        line = json.dumps(result.values())
        if as_json:
            print(line, flush=True)
        else:
            console.print(result.shown(), "")
        if save is not None:
            with save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    async def connect() -> list[LoadResult]:
        client = HttpClient(url, os.environ.get(KEY_VARIABLE))
        try:
            return await measure(client, model, config, show)
        finally:
            client.close()

    results = run(connect())
    if len(results) > 1 and not as_json:
        console.print(sweep_table(results))
    return results
