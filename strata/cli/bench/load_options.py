"""Options that describe a load, of a running server (`strata bench serve`) and of a simulated one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.options import is_passed

if TYPE_CHECKING:
    from strata.bench.load.request_sets import Lengths
    from strata.bench.load.sessions import SessionShape
    from strata.bench.load.sweep import LoadConfig

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


@dataclass(frozen=True)
class LoadOptions:
    """Of a load; what says otherwise of a server and of a simulation is theirs."""

    dataset: str = "random"
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Requests of each load; 1000, or all of a file.")] = (
        None
    )
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a drawn prompt (after its shared prefix).")] = 512
    output_len: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, also of a file's that have no output_length.")
    ] = 128
    length_spread: Annotated[
        float, typer.Option(min=0, max=1, help="Lengths are drawn evenly from 1 - this to 1 + this times those.")
    ] = 0.0
    longest: Annotated[
        int, typer.Option(min=1, help="Most tokens of a lognormal prompt, and of its answer; the others are means.")
    ] = 2048
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of a shared prefix.")] = 1024
    prefix_groups: Annotated[int, typer.Option(min=1, help="Number of shared prefixes.")] = 8
    request_rate: str = "inf"
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.")
    ] = 1.0
    max_concurrency: int | None = None
    replay: Annotated[bool, typer.Option("--replay", help="Send a file's requests at their timestamps (ms).")] = False
    goodput: Annotated[str, typer.Option(help="Most ms of ttft, tpot, e2e: 'ttft:200 tpot:15'.")] = ""
    seed: int = 0

    def check_used(self, context: typer.Context) -> None:
        """Raises ValueError for an option that was given and of which this load knows nothing. What names no dataset is
        left to who reads it."""
        is_file = Path(self.dataset).exists() and not Path(self.dataset).is_dir()
        kind = _FILE if is_file and self.dataset not in ("agents", *_SINGLE) else self.dataset
        if kind not in ("agents", *_SINGLE):
            return
        for name, datasets in _OF_DATASETS.items():
            if kind not in datasets and is_passed(context, name):
                option, known = f"--{name.replace('_', '-')}", ", ".join(datasets)
                raise ValueError(f"{option} is of --dataset {known}: leave it out with --dataset {self.dataset}")
        from strata.bench.load.arrivals import parse_rates

        if is_passed(context, "burstiness") and all(math.isinf(rate.value) for rate in parse_rates(self.request_rate)):
            raise ValueError("--burstiness is of requests that come at a rate: give a --request-rate, or leave it out")

    def config(self, *, chat: bool = False, timeout: float = 0.0, sessions: SessionShape | None = None) -> LoadConfig:
        """chat: prompts are sent as text. timeout: seconds after which a request is given up. sessions: of agents, who
        need a server. Raises ValueError for options that contradict each other."""
        from strata.bench.load.arrivals import MAX_BURSTINESS, parse_rates
        from strata.bench.load.measures import parse_objectives
        from strata.bench.load.request_sets import EvenLengths, LognormalLengths
        from strata.bench.load.sweep import AGENTS, SYNTHETIC, LoadConfig

        if self.dataset == AGENTS and sessions is None:
            raise ValueError(
                f"--dataset {AGENTS} has turns that wait for answers, which only a server gives (strata bench serve): "
                f"give {', '.join(SYNTHETIC)} or a JSON-lines file"
            )
        if self.replay and (self.request_rate != "inf" or self.dataset in (AGENTS, *SYNTHETIC)):
            raise ValueError(
                "--replay sends a file's requests at their timestamps: it needs --dataset, no --request-rate"
            )
        if not (0 < self.burstiness <= MAX_BURSTINESS or self.burstiness == math.inf):
            raise ValueError(
                f"--burstiness must be above 0, at most {MAX_BURSTINESS:,.0f}, or inf for even gaps; got "
                f"{self.burstiness:g}"
            )
        means = self.input_len, self.output_len
        lengths: Lengths = EvenLengths(*means, self.length_spread)
        if self.dataset == "lognormal":
            lengths = LognormalLengths(*means, self.longest)
            for option, mean in zip(("--input-len", "--output-len"), means, strict=True):
                if mean > self.longest:
                    raise ValueError(
                        f"{option} {mean} is the mean of lengths that --longest {self.longest} cuts: lower it, or "
                        "raise --longest"
                    )
        return LoadConfig(
            dataset=self.dataset,
            chat=chat,
            requests=self.num_prompts,
            lengths=lengths,
            prefix_tokens=self.prefix_len,
            prefix_groups=self.prefix_groups,
            rates=None if self.replay else parse_rates(self.request_rate),
            burstiness=self.burstiness,
            max_concurrency=self.max_concurrency,
            objectives=parse_objectives(self.goodput),
            timeout=timeout,
            seed=self.seed,
            sessions=sessions,
        )
