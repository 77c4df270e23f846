"""What the server counts, as Prometheus reads it: the names are vLLM's with `strata_` before them.

What concerns requests is counted here, in the API process. What concerns the engine is in its newest `Statistics`, of
which the processes hear at different times: what one of them has reported is the least that any reports from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from strata.engine.process.messages import Statistics
from strata.serve.observe.handlers import OTHER
from strata.serve.observe.metric_cells import KINDS, CallerCounts, Cells

Endpoint = Literal["chat", "completions", "responses", "embeddings", "tokenize", "detokenize"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)

Rejection = Literal[
    "queue_full", "concurrency", "requests_per_minute", "tokens_per_minute", "draining", "engine_gone", "unauthorized",
    "forbidden", "too_large", "invalid", "deadline",
]  # fmt: skip
REJECTIONS: tuple[Rejection, ...] = get_args(Rejection)

_ENGINE_GAUGES: dict[str, tuple[str, Callable[[Statistics], float | None]]] = {
    "num_requests_running": ("Sequences in the running batch.", lambda s: s.running),
    "num_requests_waiting": ("Sequences that wait to be run.", lambda s: s.waiting),
    "num_tokens_waiting": ("Tokens of prompts that are still to be computed.", lambda s: s.waiting_tokens),
    "kv_cache_usage_perc": ("Share of the KV pages in use; 1 is all.", lambda s: s.kv_usage),
    "recorded_sizes": ("Sizes of steps that replay CUDA graphs.", lambda s: s.recorded_sizes),
    # Of the last seconds; without a value while nothing runs, and the first two where the device is not known.
    "step_floor_share": ("Least seconds of recent steps, by those that they took.", lambda s: s.floor_share),
    "step_predicted_ratio": ("Predicted seconds of recent steps, by measured ones.", lambda s: s.predicted_ratio),
    "step_gap_share": ("Share of the time in which the device waited for the host.", lambda s: s.gap_share),
}
_ENGINE_COUNTERS: dict[str, tuple[str, str | None, dict[str, Callable[[Statistics], int]]]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", None, {"": lambda s: s.prefix_queries}),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", None, {"": lambda s: s.prefix_hits}),
    "num_preemptions": ("Sequences put back to wait for lack of KV pages.", None, {"": lambda s: s.preemptions}),
    "corrupted_requests": ("Requests whose logits were no distribution.", None, {"": lambda s: s.failed}),
    "engine_steps": ("Steps of the engine.", None, {"": lambda s: s.steps}),
    "compilations_after_ready": (
        "Kernels compiled or read from the disk while requests waited.",
        "kind",
        {
            "kernel": lambda s: s.compiled_kernels,
            "cached kernel": lambda s: s.cached_kernels,
        },
    ),
    "unrecorded_steps": (
        "Steps that the host launched kernel by kernel, of an engine that has CUDA graphs for steps.",
        "reason",
        {
            "too_large": lambda s: s.too_large,
            "prompt_logprobs": lambda s: s.scored,
            "out_of_memory": lambda s: s.not_recorded,
        },
    ),
}

_CALLER_HELP = dict(zip(KINDS, ("Requests received.", "Prompt tokens.", "Tokens generated."), strict=True))

# What is answered here; "none" if the client left before there was a status.
_STATUSES = (
    "200", "204", "304", "400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "431", "499", "500",
    "503", "none", "other",
)  # fmt: skip

FINISHED_REASONS = ("stop", "length", "abort", "error")

# Six to a factor of ten, so that a percentile read from them is within a third of the true one.
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)


def _bounds(first: int, last: int) -> tuple[float, ...]:
    """Upper bounds in seconds from 10^first to 10^last."""
    return (*(float(f"{step}e{power}") for power in range(first, last) for step in _STEPS), 10.0**last)


REQUEST_BOUNDS = _bounds(-3, 3)
TOKEN_BOUNDS = _bounds(-4, 1)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", REQUEST_BOUNDS),
    "inter_token_latency_seconds": ("Between a token and the one before it in its sample.", TOKEN_BOUNDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_BOUNDS),
    "request_queue_time_seconds": ("From arrival to the first step that computes any of the prompt.", REQUEST_BOUNDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST_BOUNDS),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_BOUNDS),
}
_COUNTERS: dict[str, tuple[str, str | None, Sequence[str]]] = {
    "requests": ("Requests received.", "endpoint", ENDPOINTS),
    "request_success": ("Requests that have ended, by how.", "finished_reason", FINISHED_REASONS),
    "rejects": ("Requests that were not taken, or not for so long.", "reason", REJECTIONS),
    "aborts": ("Requests whose client left before the end.", None, ("",)),
    "prompt_tokens": ("Prompt tokens that have had a first token or a vector, cached ones included.", None, ("",)),
    "generation_tokens": ("Tokens generated.", None, ("",)),
    "engine_restarts": ("Engines that are ready in the place of one that has ended.", None, ("",)),
}


@dataclass(frozen=True)
class RequestRecord:
    """One request from its arrival to its end. Times are `time.monotonic()`, in seconds.

    reason: the engine's finish reason, or "abort" if the client left.
    scheduled, first_token: None if it never came to that. output_tokens: of all samples.
    """

    endpoint: Endpoint
    reason: str
    arrival: float
    scheduled: float | None
    first_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Metrics:
    """Counters and histograms of one API process.

    model_name: the label that every series bears. engines: how many there are; series of engines bear the label
        `engine`, numbers from 0.
    folder, worker: where the API processes of one server keep their numbers, and which of them this is; each of them
        then renders the sum over all. Without a folder this process is the only one.
    handlers: (method, template of a path) of the routes that requests are counted under, the same in all processes.
    """

    def __init__(
        self,
        model_name: str,
        folder: Path | None = None,
        worker: int = 0,
        engines: int = 1,
        handlers: Sequence[tuple[str, str]] = (OTHER,),
    ) -> None:
        self._model_name, self._worker = model_name, worker
        self._handlers = list(handlers)
        self._callers = CallerCounts(folder, worker)
        self._first: dict[str, int] = {}
        count = 0
        for name, (_, _, values) in _COUNTERS.items():
            self._first[name] = count
            count += len(values)
        for name, (_, bounds) in _HISTOGRAMS.items():
            self._first[name] = count
            count += len(bounds) + 2  # one bucket above the last bound, and the sum
        self._first["http_requests"] = count
        count += len(self._handlers) * len(_STATUSES)
        names = [(name, value) for name, (_, _, counts) in _ENGINE_COUNTERS.items() for value in counts]
        # As they were last reported, of each engine by name and label; and what those before it had counted.
        self._engine_cells: list[dict[tuple[str, str], int]] = []
        for _ in range(engines):
            self._engine_cells.append({name: count + at for at, name in enumerate(names)})
            count += len(names)
        self._former_engines = [dict.fromkeys(names, 0.0) for _ in range(engines)]
        self._ended: set[int] = set()  # engines that have ended and are not replaced yet
        self._cells = Cells(count, folder, worker)
        self._values = self._cells.values
        self._endpoints = {value: self._first["requests"] + at for at, value in enumerate(ENDPOINTS)}
        self._rejections = {value: self._first["rejects"] + at for at, value in enumerate(REJECTIONS)}
        self._reasons = {value: self._first["request_success"] + at for at, value in enumerate(FINISHED_REASONS)}

    def received(self, endpoint: Endpoint, caller: str) -> None:
        """A request has arrived. caller: the name of its key."""
        self._values[self._endpoints[endpoint]] += 1
        self._callers.of(caller)[0] += 1

    def answered(self, handler: int, status: int | None) -> None:
        """A request has been answered. handler: its place among the handlers. status: None if it never came to one."""
        told = "none" if status is None else str(status)
        place = _STATUSES.index(told if told in _STATUSES else "other")
        self._values[self._first["http_requests"] + handler * len(_STATUSES) + place] += 1

    def rejected(self, reason: Rejection) -> None:
        """A request is not taken."""
        self._values[self._rejections[reason]] += 1

    def aborted(self) -> None:
        """The client of a request has left."""
        self._values[self._first["aborts"]] += 1

    def tokens(self, *, prompt: int, output: int, caller: str) -> None:
        """Tokens that the engine has computed, counted as they come: a prompt with its request's first delta."""
        of_caller = self._callers.of(caller)
        if prompt:
            self._values[self._first["prompt_tokens"]] += prompt
            of_caller[1] += prompt
        if output:
            self._values[self._first["generation_tokens"]] += output
            of_caller[2] += output

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after its arrival."""
        self._observe("time_to_first_token_seconds", REQUEST_BOUNDS, seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens of one sample came together, `seconds` after the ones before: as many gaps, equally long."""
        first = self._first["inter_token_latency_seconds"]
        self._values[first + bisect_left(TOKEN_BOUNDS, seconds / tokens)] += tokens
        self._values[first + len(TOKEN_BOUNDS) + 1] += seconds

    def finished(self, record: RequestRecord) -> None:
        """A request has ended, whichever way."""
        self._values[self._reasons.get(record.reason, self._reasons["error"])] += 1
        self._observe("e2e_request_latency_seconds", REQUEST_BOUNDS, record.ended - record.arrival)
        if record.scheduled is not None:
            self._observe("request_queue_time_seconds", REQUEST_BOUNDS, record.scheduled - record.arrival)
        if record.scheduled is not None and record.first_token is not None:
            self._observe("request_prefill_time_seconds", REQUEST_BOUNDS, record.first_token - record.scheduled)
        if record.first_token is not None:
            self._observe("request_decode_time_seconds", REQUEST_BOUNDS, record.ended - record.first_token)

    def engine_ended(self, statistics: Statistics, engine: int = 0) -> None:
        """The next engine of that number counts from 0 again. statistics: the newest of the one that has ended, which
        count no more, whoever renders them."""
        self._former_engines[engine] = self._engine_counts(engine, statistics)
        self._ended.add(engine)

    def engine_restarted(self, engine: int = 0) -> None:
        """The next engine of that number is ready. All API processes see it, so the first one counts it."""
        self._ended.discard(engine)
        if self._worker == 0:
            self._values[self._first["engine_restarts"]] += 1

    def render(self, *engines: Statistics) -> bytes:
        """All series in Prometheus' text format (its media type is `prometheus_client.CONTENT_TYPE_PLAIN_0_0_4`).

        engines: how each of them stands.
        """
        registry = CollectorRegistry()
        families = [*self._engine_gauges(engines), *self._engine_counters(engines), *self._request_families()]
        registry.register(_Families(families))
        return generate_latest(registry)

    def _observe(self, name: str, bounds: tuple[float, ...], seconds: float) -> None:
        first = self._first[name]
        self._values[first + bisect_left(bounds, seconds)] += 1
        self._values[first + len(bounds) + 1] += seconds

    def _request_families(self) -> Iterable[Metric]:
        sums = self._cells.sums()
        for name, (help_text, label, values) in _COUNTERS.items():
            labels = ["model_name"] if label is None else ["model_name", label]
            counter = CounterMetricFamily(f"strata_{name}", help_text, labels=labels)
            for at, value in enumerate(values, self._first[name]):
                counter.add_metric([self._model_name, value][: len(labels)], sums[at])
            yield counter
        yield self._answers(sums)
        yield from self._caller_families()
        for name, (help_text, bounds) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"strata_{name}", help_text, labels=["model_name"])
            first = self._first[name]
            above = first + len(bounds)
            totals = accumulate(sums[first : above + 1])
            buckets = list(zip([*map(str, bounds), "+Inf"], totals, strict=True))
            histogram.add_metric([self._model_name], buckets, sum_value=sums[above + 1])
            yield histogram

    def _answers(self, sums: Sequence[float]) -> Metric:
        """Of every handler and status that there was."""
        labels = ["model_name", "method", "handler", "status"]
        counter = CounterMetricFamily("strata_http_requests", "Requests answered, by route and status.", labels=labels)
        for number, (method, path) in enumerate(self._handlers):
            first = self._first["http_requests"] + number * len(_STATUSES)
            for at, status in enumerate(_STATUSES, first):
                if sums[at]:
                    counter.add_metric([self._model_name, method, path, status], sums[at])
        return counter

    def _caller_families(self) -> Iterable[Metric]:
        of_callers = self._callers.sums()
        for at, kind in enumerate(KINDS):
            help_text = f"{_CALLER_HELP[kind]} By the name of the key."
            counter = CounterMetricFamily(f"strata_caller_{kind}", help_text, labels=["model_name", "caller"])
            for caller, counts in of_callers.items():
                counter.add_metric([self._model_name, caller], counts[at])
            yield counter

    def _engine_counts(self, engine: int, statistics: Statistics) -> dict[tuple[str, str], float]:
        """What the engines of a number have counted, as this process or any other has reported."""
        if engine in self._ended:
            statistics = Statistics()
        largest, cells, former = self._cells.largest(), self._engine_cells[engine], self._former_engines[engine]
        return {
            (name, value): max(largest[cells[name, value]], former[name, value] + count(statistics))
            for name, (_, _, counts) in _ENGINE_COUNTERS.items()
            for value, count in counts.items()
        }

    def _engine_counters(self, engines: Sequence[Statistics]) -> Iterable[Metric]:
        found = [self._engine_counts(engine, statistics) for engine, statistics in enumerate(engines)]
        for cells, counted in zip(self._engine_cells, found, strict=True):
            for key, total in counted.items():
                self._values[cells[key]] = total
        for name, (help_text, label, counts) in _ENGINE_COUNTERS.items():
            labels = ["model_name", "engine"] if label is None else ["model_name", "engine", label]
            counter = CounterMetricFamily(f"strata_{name}", help_text, labels=labels)
            for engine, counted in enumerate(found):
                for value in counts:
                    counter.add_metric([self._model_name, str(engine), value][: len(labels)], counted[name, value])
            yield counter

    def _engine_gauges(self, engines: Sequence[Statistics]) -> Iterable[Metric]:
        for name, (help_text, value) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"strata_{name}", help_text, labels=["model_name", "engine"])
            for engine, statistics in enumerate(engines):
                found = value(statistics)
                if found is not None:
                    gauge.add_metric([self._model_name, str(engine)], found)
            yield gauge
        labels = ["model_name", "engine", "finding", "layer", "cause"]
        verdict = GaugeMetricFamily("strata_verdict", "What holds the engine back now: always 1.", labels=labels)
        for engine, statistics in enumerate(engines):
            if statistics.finding:
                told = [statistics.finding, statistics.layer, statistics.cause]
                verdict.add_metric([self._model_name, str(engine), *told], 1)
        yield verdict


class _Families:
    """The families of one reading, as a registry takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
