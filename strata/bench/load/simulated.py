"""Loads as `strata bench serve` sends them, on a simulated server, and their figures in the same form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group

from strata.bench.load.arrivals import arrival_times, load_seeds, saturation_rate
from strata.bench.load.measures import Distribution, Figures, Goodput
from strata.bench.load.report import LoadResult
from strata.bench.load.request_sets import Ask, EvenLengths, FileSet, RandomSet, SharedPrefixSet, read_rows
from strata.bench.load.sweep import LENGTH_OPTIONS, REQUESTS, SATURATING_CONCURRENCY, SYNTHETIC, LoadConfig, in_words
from strata.files.request_rows import RequestRow
from strata.plan.simulate.fleet import Failure, Fleet
from strata.plan.simulate.request import Outcomes, SimulatedRequest, blank_prompt
from strata.plan.simulate.timeline import Moment

# Ids of drawn prompts: which ones there are does not matter, and so many are enough to tell prompts apart.
_IDS = range(1, 50_000)


@dataclass(frozen=True)
class SimulatedResult(LoadResult):
    """As of a server, and of what: the device, how many engines of how many ranks each; preemptions of all engines, the
    share of prompt tokens found in their prefix caches (None: none were looked up), and `timeline`. failures: of
    engines, as they were asked for."""

    device: str
    engines: int
    tensor_parallel_size: int
    preemptions: int
    prefix_hits: float | None
    timeline: tuple[Moment, ...]
    failures: tuple[Failure, ...]

    def values(self) -> dict[str, Any]:
        return {**super().values(), "test": "T5 simulated"}

    def shown(self) -> Group:
        """The same, and of what it is a simulation."""
        ranks = f" of {self.tensor_parallel_size} ranks" if self.tensor_parallel_size > 1 else ""
        words = f"simulated: {self.engines} x {self.device}{ranks}"
        for one in self.failures:
            late = one.at >= self.figures.seconds
            words += f"; engine {one.replica} ends at {one.at:g} s for {one.down:g} s" + ", behind the load" * late
        if self.preemptions:
            words += f"; {self.preemptions:,} preempted"
        if self.prefix_hits is not None:
            words += f"; {self.prefix_hits:.0%} of prompt tokens found in prefix caches"
        return Group(words, super().shown())


@dataclass(frozen=True)
class SimulatedServer:
    """What is simulated. make: a server with its engines, for requests, of which at most so many are under way; the
    flag says whether to keep prefix trees, which cost memory. caches: whether its engines have any. failures:
    see `SimulatedResult`."""

    model: str
    device: str
    engines: int
    tensor_parallel_size: int
    max_model_len: int
    caches: bool
    make: Callable[[Sequence[SimulatedRequest], int | None, bool], Fleet]
    failures: tuple[Failure, ...] = ()


def simulate_loads(served: SimulatedServer, config: LoadConfig) -> Iterator[SimulatedResult]:
    """The result of each load, as it comes. Raises ValueError for requests that are not in order, or too long."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rows = None if config.dataset in SYNTHETIC else read_rows(Path(config.dataset), timed=config.rates is None)
    count = config.requests or (REQUESTS if rows is None else len(rows))
    seeds = load_seeds(config.seed)
    next(seeds)  # of the one request that a server is tried with

    def load(
        seed: int, rate: float | None, saturation: float | None, concurrency: int | None
    ) -> tuple[Fleet, SimulatedResult]:
        requests = _requests(config, rows, count, seed, rate, served.max_model_len)
        shares = rows is not None or config.dataset == "shared-prefix"
        fleet = served.make(requests, concurrency, served.caches and shares)
        fleet.run()
        if served.caches and not shares and any(one.statistics.preemptions for one in fleet.schedulers):
            # Who is preempted finds again what it had computed: played anew, with trees and with ids of its own.
            named = [replace(one, prompt=(number,) * len(one.prompt)) for number, one in enumerate(requests)]
            fleet = served.make(named, concurrency, True)
            fleet.run()
        counted = [engine.statistics for engine in fleet.schedulers]
        queries = sum(one.prefix_queries for one in counted)
        result = SimulatedResult(
            started=started,
            model=served.model,
            data=in_words(config),
            request_rate=rate,
            saturation=saturation,
            burstiness=config.burstiness,
            max_concurrency=concurrency,
            seed=config.seed,
            figures=figures_of(fleet.outcomes, config.objectives),
            device=served.device,
            engines=served.engines,
            tensor_parallel_size=served.tensor_parallel_size,
            preemptions=sum(one.preemptions for one in counted),
            prefix_hits=sum(one.prefix_hits for one in counted) / queries if queries else None,
            timeline=tuple(fleet.timeline.moments),
            failures=served.failures,
        )
        return fleet, result

    if config.rates is None:
        yield load(config.seed, None, None, config.max_concurrency)[1]
        return
    saturation = None
    if config.saturating:
        concurrency = config.max_concurrency or SATURATING_CONCURRENCY
        fleet, result = load(next(seeds), math.inf, None, concurrency)
        saturation = saturation_rate([fleet.outcomes.last[one] for one in fleet.outcomes.completed()], concurrency)
        yield replace(result, saturation=saturation)
    for rate in config.rates:
        # As `Sweep.offer`: a rate that is a share of saturation is an open loop.
        share, bound = (saturation, None) if rate.of_saturation else (None, config.max_concurrency)
        yield load(next(seeds), rate.per_second(saturation), share, bound)[1]


def _requests(
    config: LoadConfig, rows: tuple[RequestRow, ...] | None, count: int, seed: int, rate: float | None, longest: int
) -> list[SimulatedRequest]:
    """As a load generator sends them; prompts that share nothing are as good as their lengths."""
    _check_lengths(config, None if rows is None else rows[:count], longest)
    lengths = config.lengths
    if rows is not None:
        asks: Sequence[Ask] = FileSet(Path(config.dataset), rows, lengths.output, _IDS).asks(count, seed)
    elif config.dataset == "shared-prefix":
        asks = SharedPrefixSet(lengths, _IDS, config.prefix_groups, config.prefix_tokens).asks(count, seed)
    elif isinstance(lengths, EvenLengths) and not lengths.spread:
        asks = [Ask([0] * lengths.prompt, lengths.output)] * count
    else:
        asks = RandomSet(lengths, _IDS).asks(count, seed)
    due = [ask.due or 0.0 for ask in asks] if rate is None else arrival_times(count, rate, config.burstiness, seed)
    shares = rows is not None or config.dataset == "shared-prefix"
    requests = []
    for at, ask in zip(due, asks, strict=True):
        prompt: Any = tuple(ask.prompt) if shares else blank_prompt(len(ask.prompt))
        requests.append(SimulatedRequest(at, prompt, ask.output_tokens))
    return requests


def _check_lengths(config: LoadConfig, rows: tuple[RequestRow, ...] | None, longest: int) -> None:
    """Raises ValueError for what is no tokens or too many, before any are drawn: they may be more than memory holds."""
    if rows is None:
        most = config.lengths.max_tokens + (config.prefix_tokens if config.dataset == "shared-prefix" else 0)
        if most > longest:
            raise ValueError(
                f"requests have up to {most} tokens with their answers, but max_model_len is {longest}: lower "
                f"{LENGTH_OPTIONS[config.dataset]}, or raise --max-model-len"
            )
        return
    for number, row in enumerate(rows, 1):
        if row.messages or isinstance(row.prompt, str):
            raise ValueError(
                f"request {number} of {config.dataset} is text, of which a simulation does not know the tokens: give "
                "prompt as token ids, or input_length"
            )
        prompt, output = row.input_length or len(row.prompt or ()), row.output_length or config.lengths.output
        if prompt + output > longest:
            raise ValueError(
                f"request {number} has {prompt} tokens and {output} of its answer, but max_model_len is {longest}: "
                "leave it out, or raise --max-model-len"
            )


def figures_of(outcomes: Outcomes, objectives: Mapping[str, float]) -> Figures:
    """As `strata.bench.load.measures.figures` of what a client of such a server would have measured."""
    good = outcomes.completed()
    due, sent = np.frombuffer(outcomes.due), np.frombuffer(outcomes.sent)
    first, last = np.frombuffer(outcomes.first), np.frombuffer(outcomes.last)
    prompts, outputs = (np.frombuffer(one, np.int32).astype(np.int64) for one in (outcomes.prompt, outcomes.output))
    ttft, e2e, after_first = (first - sent)[good], (last - sent)[good], outputs[good] - 1
    several = after_first > 0
    tpot = np.full(len(good), np.nan)
    tpot[several] = (last - first)[good][several] / after_first[several]
    seconds = float(np.nanmax(last) - np.nanmin(sent))
    prompt_tokens, output_tokens = int(prompts[good].sum()), int(outputs[good].sum())
    met = np.ones(len(good), dtype=bool)
    for name, most in objectives.items():
        met &= ~(1e3 * {"ttft": ttft, "tpot": tpot, "e2e": e2e}[name] > most)
    goodput = Goodput(dict(objectives), int(met.sum()) / seconds, int(met.sum()) / len(sent))
    return Figures(
        requests=len(sent),
        completed=len(good),
        faults=dict(Counter(outcomes.faults.values())),
        fault_messages={},
        lost=0,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunks=output_tokens,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        ttft_ms=_distribution(ttft),
        tpot_ms=_distribution(tpot[several]),
        itl_ms=_counted(*outcomes.intervals.counted()),
        e2e_ms=_distribution(e2e),
        send_lag_ms=_distribution(np.maximum(0.0, sent - due)),
        goodput=goodput if objectives else None,
    )


def _distribution(seconds: NDArray[np.float64]) -> Distribution | None:
    if not len(seconds):
        return None
    return Distribution(1e3 * float(seconds.mean()), *(1e3 * np.quantile(seconds, (0.5, 0.9, 0.99))).tolist())


def _counted(seconds: NDArray[np.float64], counts: NDArray[np.int64]) -> Distribution | None:
    """Of values and how many there are of each, rising."""
    if not len(seconds):
        return None
    upto = np.cumsum(counts)
    places = np.searchsorted(upto, np.array((0.5, 0.9, 0.99)) * upto[-1])
    mean = float((seconds * counts).sum() / upto[-1])
    return Distribution(1e3 * mean, *(1e3 * seconds[places]).tolist())
