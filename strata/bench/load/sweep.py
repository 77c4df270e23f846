"""Loads one after the other: the saturation of a server where rates are shares of it, then each rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.bench.load import server
from strata.bench.load.arrivals import Rate, arrival_times, load_seeds, saturation_rate
from strata.bench.load.connection import HttpClient
from strata.bench.load.measures import figures
from strata.bench.load.report import LoadResult
from strata.bench.load.request_sets import (
    Ask,
    FileSet,
    Lengths,
    RandomSet,
    RequestSet,
    SharedPrefixSet,
    encode,
    read_rows,
)
from strata.bench.load.send import RequestOutcome, send_all
from strata.bench.load.sessions import SessionShape, send_sessions, turn_request
from strata.text.counted import counted

SYNTHETIC = ("random", "shared-prefix", "lognormal")
AGENTS = "agents"
# What makes requests longer.
LENGTH_OPTIONS = {
    "random": "--input-len or --output-len",
    "shared-prefix": "--input-len, --prefix-len or --output-len",
    "lognormal": "--longest",
}
REQUESTS = 1000
SATURATING_CONCURRENCY = 256

Show = Callable[[LoadResult], None]


@dataclass(frozen=True)
class LoadConfig:
    """What is to be measured.

    dataset: one of SYNTHETIC, AGENTS, or a file. chat: prompts become chats. requests: of each load; None for 1000, or
    all of the file. rates: of the loads; None to send the file's requests at their timestamps. burstiness: see
    `arrival_times`. max_concurrency: most requests under way, None for no bound; if rates are shares of saturation,
    while that is measured. objectives: milliseconds by name, of the goodput. timeout: seconds after which a request is
    given up. sessions: of AGENTS, whose turns come at times of their own; only these three and the seed count then.
    """

    dataset: str
    chat: bool
    requests: int | None
    lengths: Lengths
    prefix_tokens: int
    prefix_groups: int
    rates: list[Rate] | None
    burstiness: float
    max_concurrency: int | None
    objectives: dict[str, float]
    timeout: float
    seed: int
    sessions: SessionShape | None = None

    @property
    def saturating(self) -> bool:
        """Whether saturation must be measured first."""
        return any(rate.of_saturation for rate in self.rates or ())


async def measure(
    client: HttpClient, model: str | None, config: LoadConfig, show: Callable[[LoadResult], None]
) -> list[LoadResult]:
    """The result of each load, which `show` gets as it comes. Raises ValueError if the server cannot be measured."""
    served = await server.find_model(client, model)
    if (shape := config.sessions) is not None:
        if served.max_model_len is not None and shape.context > served.max_model_len:
            raise ValueError(
                f"sessions have contexts of up to {shape.context} tokens, {served.name} takes {served.max_model_len}: "
                "lower --context-len"
            )
        sweep = Sweep(client, served.name, config, None, show)
        await sweep.converse(shape, await server.text_ids(client, served.name))
        return sweep.results
    sweep = Sweep(client, served.name, config, await _request_set(client, served, config), show)
    await sweep.try_one()
    if config.rates is None:
        await sweep.replay()
    saturation = await sweep.saturate() if config.saturating else None
    for rate in config.rates or ():
        await sweep.offer(rate, saturation)
    return sweep.results


class Sweep:
    """The loads of a configuration; `results` has those that are done. Each load draws prompts of its own from the
    seed, so that none finds its prompts in the server's prefix cache (those of a file are what they are).
    """

    def __init__(
        self, client: HttpClient, model: str, config: LoadConfig, asked: RequestSet | None, show: Show
    ) -> None:
        """asked: None for sessions, whose turns are drawn by themselves."""
        self.results: list[LoadResult] = []
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._client = client
        self._model = model
        self._config = config
        self._asked = asked
        self._show = show
        self._seeds = load_seeds(config.seed)
        self._requests = config.requests or (len(asked.rows) if isinstance(asked, FileSet) else REQUESTS)

    async def try_one(self) -> None:
        """One request before all loads. Raises ValueError if it does not get what it asks for."""
        (ask,) = await self._asks(1, next(self._seeds))
        await server.try_one(self._client, encode(ask, self._model))

    async def replay(self) -> None:
        """The file's requests at their own times."""
        asks = await self._asks(self._requests, self._config.seed)
        outcomes = await self._send(asks, [ask.due or 0.0 for ask in asks], self._config.max_concurrency, "replay")
        self._add(outcomes, None, None, self._config.max_concurrency)

    async def saturate(self) -> float:
        """Requests a second that the server sustains with `max_concurrency` of them always under way."""
        concurrency = self._config.max_concurrency or SATURATING_CONCURRENCY
        asks = await self._asks(self._requests, next(self._seeds))
        outcomes = await self._send(asks, [0.0] * len(asks), concurrency, "saturation")
        rate = saturation_rate([outcome.ended for outcome in outcomes if outcome.fault is None], concurrency)
        self._add(outcomes, math.inf, rate, concurrency)
        return rate

    async def offer(self, rate: Rate, saturation: float | None) -> None:
        """Requests at a rate. One that is a share of saturation is an open loop: no bound hides how long they wait."""
        seed = next(self._seeds)
        asks = await self._asks(self._requests, seed)
        per_second = rate.per_second(saturation)
        concurrency = None if rate.of_saturation else self._config.max_concurrency
        due = arrival_times(len(asks), per_second, self._config.burstiness, seed)
        outcomes = await self._send(asks, due, concurrency, f"{per_second:.3g} requests/s")
        self._add(outcomes, per_second, saturation if rate.of_saturation else None, concurrency)

    async def converse(self, shape: SessionShape, ids: Sequence[int]) -> None:
        """All turns of all sessions, of these ids, behind one request with a prompt of its own."""
        tried = replace(shape, sessions=1, turns=1).draw(ids, next(self._seeds))[0][0]
        await server.try_one(self._client, turn_request(self._model, (), tried, 1))
        sessions = shape.draw(ids, next(self._seeds))
        with _progress("turns", shape.sessions * shape.turns) as advance:
            timeout = self._config.timeout
            outcomes = await send_sessions(
                self._client, self._model, sessions, shape.context, timeout=timeout, on_end=advance
            )
        self._add(outcomes, None, None, shape.sessions)

    async def _asks(self, count: int, seed: int) -> list[Ask]:
        assert self._asked is not None
        asks = self._asked.asks(count, seed)
        return await server.as_chats(self._client, self._model, asks) if self._config.chat else asks

    async def _send(
        self, asks: list[Ask], due: list[float], concurrency: int | None, name: str
    ) -> list[RequestOutcome]:
        requests = [encode(ask, self._model) for ask in asks]
        with _progress(name, len(requests)) as advance:
            return await send_all(
                self._client,
                requests,
                due,
                max_concurrency=concurrency,
                timeout=self._config.timeout,
                on_end=advance,
            )

    def _add(
        self, outcomes: list[RequestOutcome], rate: float | None, saturation: float | None, concurrency: int | None
    ) -> None:
        result = LoadResult(
            started=self._started,
            model=self._model,
            data=in_words(self._config),
            request_rate=rate,
            saturation=saturation,
            burstiness=self._config.burstiness,
            max_concurrency=concurrency,
            seed=self._config.seed,
            figures=figures(outcomes, self._config.objectives),
        )
        self.results.append(result)
        self._show(result)


@contextmanager
def _progress(name: str, requests: int) -> Iterator[Callable[[], None]]:
    """Shows how many requests have ended; what it gives is called as each does."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(name, total=requests)
        yield lambda: progress.advance(task)


async def _request_set(client: HttpClient, served: server.ServedModel, config: LoadConfig) -> RequestSet:
    if config.dataset not in SYNTHETIC:
        path = Path(config.dataset)
        rows = read_rows(path, timed=config.rates is None)
        drawn = any(row.input_length for row in rows)
        return FileSet(path, rows, config.lengths.output, await server.text_ids(client, served.name) if drawn else ())
    shared = config.prefix_tokens if config.dataset == "shared-prefix" else 0
    most = config.lengths.max_tokens + shared
    if served.max_model_len is not None and most > served.max_model_len:
        raise ValueError(
            f"requests have up to {most} tokens with their answers, {served.name} takes {served.max_model_len}: "
            f"lower {LENGTH_OPTIONS[config.dataset]}"
        )
    ids = await server.text_ids(client, served.name)
    return (
        SharedPrefixSet(config.lengths, ids, config.prefix_groups, shared) if shared else RandomSet(config.lengths, ids)
    )


def in_words(config: LoadConfig) -> str:
    """The data set of a load."""
    if config.sessions is not None:
        return f"{AGENTS}: {config.sessions.words}"
    if config.dataset not in SYNTHETIC:
        return Path(config.dataset).name
    words = f"{config.dataset} {config.lengths.words}"
    if config.dataset == "shared-prefix":
        words += f", {counted(config.prefix_groups, 'prefix', 'prefixes')} of {config.prefix_tokens}"
    return f"{words}, as chats" if config.chat else words
