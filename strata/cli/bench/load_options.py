"""Options that describe a load, of a running server (`strata bench serve`) and of a simulated one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.cli.options import is_passed

if TYPE_CHECKING:
    from strata.bench.load.sessions import SessionShape
    from strata.bench.load.sweep import LoadConfig

NumPrompts = Annotated[int | None, typer.Option(min=1, help="Requests of each load; 1000, or all of a file.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a drawn prompt (after its shared prefix).")]
OutputLen = Annotated[
    int, typer.Option(min=1, help="Tokens of an answer, also of a file's that have no output_length.")
]
LengthSpread = Annotated[
    float, typer.Option(min=0, max=1, help="Lengths are drawn evenly from 1 - this to 1 + this times those.")
]
Longest = Annotated[
    int, typer.Option(min=1, help="Most tokens of a lognormal prompt, and of its answer; the others are means.")
]
PrefixLen = Annotated[int, typer.Option(min=1, help="Tokens of a shared prefix.")]
PrefixGroups = Annotated[int, typer.Option(min=1, help="Number of shared prefixes.")]
Burstiness = Annotated[
    float, typer.Option(help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.")
]
Replay = Annotated[bool, typer.Option("--replay", help="Send a file's requests at their timestamps (ms).")]
Sessions = Annotated[int, typer.Option(min=1, help="Sessions of agents, all under way at once.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of each session.")]
TurnInput = Annotated[str, typer.Option(metavar="LEAST-MOST", help="New tokens of a turn, drawn evenly.")]
TurnOutput = Annotated[str, typer.Option(metavar="LEAST-MOST", help="Tokens of a turn's answer, drawn evenly.")]
Pause = Annotated[str, typer.Option(metavar="LEAST-MOST", help="Seconds from an answer's end to the next turn.")]
ContextLen = Annotated[
    int, typer.Option(min=2, help="Most tokens of a turn with all before it; one that would pass it begins anew.")
]
Goodput = Annotated[str, typer.Option(help="Most ms of ttft, tpot, e2e: 'ttft:200 tpot:15'.")]

# Of which datasets an option says something; those that are not here are of all. Any file is one.
_FILE = "a file"
_SINGLE = ("random", "shared-prefix", "lognormal", _FILE)
_OF_DATASETS = {
    **dict.fromkeys(
        ("num_prompts", "output_len", "request_rate", "burstiness", "max_concurrency", "endpoint"), _SINGLE
    ),
    **dict.fromkeys(("sessions", "turns", "turn_input", "turn_output", "pause", "context_len"), ("agents",)),
    "input_len": ("random", "shared-prefix", "lognormal"),
    "length_spread": ("random", "shared-prefix"),
    "longest": ("lognormal",),
    "prefix_len": ("shared-prefix",),
    "prefix_groups": ("shared-prefix",),
}


def check_used(context: typer.Context, dataset: str, request_rate: str) -> None:
    """Raises ValueError for an option that was given and of which this load knows nothing. What names no dataset is
    left to who reads it."""
    is_file = Path(dataset).exists() and not Path(dataset).is_dir()
    kind = _FILE if is_file and dataset not in ("agents", *_SINGLE) else dataset
    if kind not in ("agents", *_SINGLE):
        return
    for name, datasets in _OF_DATASETS.items():
        if kind not in datasets and is_passed(context, name):
            option, known = f"--{name.replace('_', '-')}", ", ".join(datasets)
            raise ValueError(f"{option} is of --dataset {known}: leave it out with --dataset {dataset}")
    from strata.bench.load.arrivals import parse_rates

    if is_passed(context, "burstiness") and all(math.isinf(rate.value) for rate in parse_rates(request_rate)):
        raise ValueError("--burstiness is of requests that come at a rate: give a --request-rate, or leave it out")


def load_config(
    *,
    dataset: str,
    chat: bool,
    num_prompts: int | None,
    input_len: int,
    output_len: int,
    length_spread: float,
    longest: int,
    prefix_len: int,
    prefix_groups: int,
    request_rate: str,
    burstiness: float,
    max_concurrency: int | None,
    replay: bool,
    goodput: str,
    timeout: float,
    seed: int,
    sessions: SessionShape | None = None,
) -> LoadConfig:
    """chat: prompts are sent as text. timeout: seconds after which a request is given up. sessions: of agents, who need
    a server. Raises ValueError for options that contradict each other."""
    from strata.bench.load.arrivals import MAX_BURSTINESS, parse_rates
    from strata.bench.load.measures import parse_objectives
    from strata.bench.load.request_sets import EvenLengths, LognormalLengths
    from strata.bench.load.sweep import AGENTS, SYNTHETIC, LoadConfig

    if dataset == AGENTS and sessions is None:
        raise ValueError(
            f"--dataset {AGENTS} has turns that wait for answers, which only a server gives (strata bench serve): give "
            f"{', '.join(SYNTHETIC)} or a JSON-lines file"
        )
    if replay and (request_rate != "inf" or dataset in (AGENTS, *SYNTHETIC)):
        raise ValueError("--replay sends a file's requests at their timestamps: it needs --dataset, no --request-rate")
    if not (0 < burstiness <= MAX_BURSTINESS or burstiness == math.inf):
        raise ValueError(
            f"--burstiness must be above 0, at most {MAX_BURSTINESS:,.0f}, or inf for even gaps; got {burstiness:g}"
        )
    lognormal = dataset == "lognormal"
    for option, mean in (("--input-len", input_len), ("--output-len", output_len)):
        if lognormal and mean > longest:
            raise ValueError(
                f"{option} {mean} is the mean of lengths that --longest {longest} cuts: lower it, or raise --longest"
            )
    return LoadConfig(
        dataset=dataset,
        chat=chat,
        requests=num_prompts,
        lengths=(
            LognormalLengths(input_len, output_len, longest)
            if lognormal
            else EvenLengths(input_len, output_len, length_spread)
        ),
        prefix_tokens=prefix_len,
        prefix_groups=prefix_groups,
        rates=None if replay else parse_rates(request_rate),
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        objectives=parse_objectives(goodput),
        timeout=timeout,
        seed=seed,
        sessions=sessions,
    )


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
