"""Options that describe a load, of a running server (`strata bench serve`) and of a simulated one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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
Goodput = Annotated[str, typer.Option(help="Most ms of ttft, tpot, e2e: 'ttft:200 tpot:15'.")]


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
) -> LoadConfig:
    """chat: prompts are sent as text. timeout: seconds after which a request is given up. Raises ValueError for options
    that contradict each other."""
    from strata.bench.load.arrivals import MAX_BURSTINESS, parse_rates
    from strata.bench.load.measures import parse_objectives
    from strata.bench.load.request_sets import EvenLengths, LognormalLengths
    from strata.bench.load.sweep import SYNTHETIC, LoadConfig

    if replay and (request_rate != "inf" or dataset in SYNTHETIC):
        raise ValueError("--replay sends a file's requests at their timestamps: it needs --dataset, no --request-rate")
    if not (0 < burstiness <= MAX_BURSTINESS or burstiness == math.inf):
        raise ValueError(
            f"--burstiness must be above 0, at most {MAX_BURSTINESS:,.0f}, or inf for even gaps; got {burstiness:g}"
        )
    lognormal = dataset == "lognormal"
    if lognormal and length_spread:
        raise ValueError("--length-spread is of evenly drawn lengths: leave it out with --dataset lognormal")
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
    )
