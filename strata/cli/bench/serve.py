"""`strata bench serve`: load on a running server, and the latencies, throughput and goodput under it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from strata.bench.load.connection import HttpClient
from strata.bench.load.plot import plot_latency, plottable
from strata.bench.load.report import LoadResult, sweep_table
from strata.bench.load.send import run
from strata.bench.load.server import KEY_VARIABLE
from strata.bench.load.sessions import SessionShape
from strata.bench.load.sweep import AGENTS, LoadConfig, measure
from strata.bench.result import report_console, writable
from strata.cli.bench.load_options import LoadOptions
from strata.cli.bench.options import Report, ReportOptions
from strata.cli.groups import OptionGroup, grouped


def _picture(file: Path | None) -> Path | None:
    return None if file is None else writable(plottable(file))


@dataclass(frozen=True)
class ServedLoadOptions(LoadOptions):
    """Of a load on a server."""

    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="completions sends token ids, chat sends text.")
    ] = "completions"
    dataset: Annotated[
        str,
        typer.Option(
            help="random, shared-prefix, lognormal (lengths as people's), agents (sessions whose turns go on from the "
            "answers), or a JSON-lines file of prompt, messages or input_length, and output_length."
        ),
    ] = "random"
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of agents, all under way at once.")] = 64
    turns: Annotated[int, typer.Option(min=1, help="Turns of each session.")] = 20
    turn_input: Annotated[str, typer.Option(metavar="LEAST-MOST", help="New tokens of a turn, drawn evenly.")] = (
        "300-2000"
    )
    turn_output: Annotated[str, typer.Option(metavar="LEAST-MOST", help="Tokens of a turn's answer, drawn evenly.")] = (
        "100-400"
    )
    pause: Annotated[str, typer.Option(metavar="LEAST-MOST", help="Seconds from an answer's end to the next turn.")] = (
        "0-5"
    )
    context_len: Annotated[
        int, typer.Option(min=2, help="Most tokens of a turn with all before it; one that would pass it begins anew.")
    ] = 32_768
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, inf, or percent of a saturation measured first; several: 25%,50%.")
    ] = "inf"
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests under way; for rates in percent, while saturation is measured (256 if left out)."
        ),
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request is given up.")] = 600.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts and arrivals.")] = 0

    def served_config(self) -> LoadConfig:
        """See `config`."""
        shape = None
        if self.dataset == AGENTS:
            new = parse_span("turn-input", self.turn_input, int, 1)
            output = parse_span("turn-output", self.turn_output, int, 1)
            pauses = parse_span("pause", self.pause, float, 0)
            shape = SessionShape(self.sessions, self.turns, new, output, pauses, self.context_len)
        return self.config(chat=self.endpoint == "chat", timeout=self.timeout, sessions=shape)


_LOAD = OptionGroup(
    ServedLoadOptions,
    "endpoint dataset num_prompts input_len output_len length_spread longest prefix_len prefix_groups sessions turns "
    "turn_input turn_output pause context_len request_rate burstiness max_concurrency replay goodput timeout seed",
    ServedLoadOptions,
)


@grouped
def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help=f"Where the server is; its key is read from {KEY_VARIABLE}.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str | None, typer.Option(help="Name of the model; the server's first if left out.")] = None,
    *,
    load: Annotated[ServedLoadOptions, _LOAD],
    to: Report,
    plot: Annotated[
        Path | None, typer.Option(help="Draw latency against load into this SVG or PNG.", callback=_picture)
    ] = None,
) -> None:
    """T5: latency, throughput and goodput of a running server under load. Exit code 1 if any request was lost.

    Example: strata bench serve --request-rate 25%,50%,75%,90% --goodput 'ttft:200 tpot:15' --plot load.svg
    """
    if plot is not None and (load.replay or set(load.request_rate.replace(",", " ").split()) == {"inf"}):
        raise ValueError("--plot draws latency against --request-rate: give it finite rates (such as 25%,50%,75%,90%)")
    load.check_used(context)
    results = measure_server(url, model, load.served_config(), to)
    if plot is not None:
        plot_latency([result.values() for result in results], plot)
    if any(result.figures.lost for result in results):
        raise typer.Exit(1)


def measure_server(url: str, model: str | None, config: LoadConfig, to: ReportOptions) -> list[LoadResult]:
    """Run the loads of a config, and report each result as it comes."""

    async def connect() -> list[LoadResult]:
        client = HttpClient(url, os.environ.get(KEY_VARIABLE))
        try:
            return await measure(client, model, config, lambda one: to.report(one.values(), one.shown()))
        finally:
            client.close()

    results = run(connect())
    if len(results) > 1 and not to.as_json:
        report_console().print(sweep_table(results))
    return results


def parse_span(option: str, text: str, number: type[int] | type[float], least: int) -> tuple[Any, Any]:
    """The two ends of "300-2000", or of "300" alone, each a `number` from `least` on. Raises ValueError."""
    low, _, high = text.partition("-")
    try:
        span = number(low), number(high or low)
    except ValueError:
        span = math.nan, math.nan
    if not least <= span[0] <= span[1] < math.inf:
        what = "whole numbers" if number is int else "seconds"
        raise ValueError(f"--{option} takes the least and the most, {what} from {least} on, like 2-5; got {text!r}")
    return span
