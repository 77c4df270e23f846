"""What the server counts, as Prometheus reads it: the names are vLLM's with `strata_` before them.

What concerns requests is counted here, in the API process. What concerns the engine is in its newest `Statistics`, of
which the processes hear at different times: what one of them has reported is the least that any reports from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

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
_Labels = tuple[str, ...]
# By name: help, names of the labels, and by their values what is counted.
_ENGINE_COUNTERS: dict[str, tuple[str, _Labels, dict[_Labels, Callable[[Statistics], int]]]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", (), {(): lambda s: s.prefix_queries}),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", (), {(): lambda s: s.prefix_hits}),
    "num_preemptions": ("Sequences put back to wait for lack of KV pages.", (), {(): lambda s: s.preemptions}),
    "corrupted_requests": ("Requests whose logits were no distribution.", (), {(): lambda s: s.failed}),
    "engine_steps": ("Steps of the engine.", (), {(): lambda s: s.steps}),
    "compilations_after_ready": (
        "Kernels compiled or read from the disk while requests waited.",
        ("kind",),
        {("kernel",): lambda s: s.compiled_kernels, ("cached kernel",): lambda s: s.cached_kernels},
    ),
    "unrecorded_steps": (
        "Steps that the host launched kernel by kernel, of an engine that has CUDA graphs for steps.",
        ("reason",),
        {
            ("too_large",): lambda s: s.too_large,
            ("prompt_logprobs",): lambda s: s.scored,
            ("out_of_memory",): lambda s: s.not_captured,
        },
    ),
}

_CALLER_HELP = dict(zip(KINDS, ("Requests received.", "Prompt tokens.", "Tokens generated."), strict=True))

# What is answered here; "none" if the client left before there was a status.
_STATUSES = (
    "200", "204", "304", "400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "431", "499", "500",
    "503", "none", "other",
)  # fmt: skip

FINISHED = ("stop", "length", "abort", "error")

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
_COUNTERS: dict[str, tuple[str, _Labels, Sequence[_Labels]]] = {
    "requests": ("Requests received.", ("endpoint",), [(one,) for one in ENDPOINTS]),
    "request_success": ("Requests that have ended, by how.", ("finished_reason",), [(one,) for one in FINISHED]),
    "rejects": ("Requests that were not taken, or not for so long.", ("reason",), [(one,) for one in REJECTIONS]),
    "aborts": ("Requests whose client left before the end.", (), [()]),
    "prompt_tokens": ("Prompt tokens that have had a first token or a vector, cached ones included.", (), [()]),
    "generation_tokens": ("Tokens generated.", (), [()]),
    "engine_restarts": ("Engines that are ready in the place of one that has ended.", (), [()]),
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
    ended: float
    prompt_tokens: int
    scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


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
        keys: list[tuple[Any, ...]] = [
            *((name, *value) for name, (_, _, values) in _COUNTERS.items() for value in values),
            # One bucket above the last bound, and the sum.
            *((name, at) for name, (_, bounds) in _HISTOGRAMS.items() for at in range(len(bounds) + 2)),
            *(("http_requests", *handler, status) for handler in self._handlers for status in _STATUSES),
            # As they were last reported of each engine.
            *(
                (engine, name, *value)
                for engine in range(engines)
                for name, (_, _, counts) in _ENGINE_COUNTERS.items()
                for value in counts
            ),
        ]
        self._place = {key: place for place, key in enumerate(keys)}
        # What those before an engine had counted, by name and labels.
        self._former_engines: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(engines)]
        self._ended: set[int] = set()  # engines that have ended and are not replaced yet
        self._cells = Cells(len(keys), folder, worker)
        self._values = self._cells.values

    def received(self, endpoint: Endpoint, caller: str) -> None:
        """A request has arrived. caller: the name of its key."""
        self._count("requests", endpoint)
        self._callers.of(caller)[0] += 1

    def answered(self, handler: int, status: int | None) -> None:
        """A request has been answered. handler: its place among the handlers. status: None if it never came to one."""
        told = "none" if status is None else str(status)
        self._count("http_requests", *self._handlers[handler], told if told in _STATUSES else "other")

    def rejected(self, reason: Rejection) -> None:
        """A request is not taken."""
        self._count("rejects", reason)

    def aborted(self) -> None:
        """The client of a request has left."""
        self._count("aborts")

    def tokens(self, *, prompt: int, output: int, caller: str) -> None:
        """Tokens that the engine has computed, counted as they come: a prompt with its request's first delta."""
        of_caller = self._callers.of(caller)
        if prompt:
            self._count("prompt_tokens", by=prompt)
            of_caller[1] += prompt
        if output:
            self._count("generation_tokens", by=output)
            of_caller[2] += output

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after its arrival."""
        self._observe("time_to_first_token_seconds", seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens of one sample came together, `seconds` after the ones before: as many gaps, equally long."""
        self._observe("inter_token_latency_seconds", seconds, tokens)

    def finished(self, record: RequestRecord) -> None:
        """A request has ended, whichever way."""
        self._count("request_success", record.reason if record.reason in FINISHED else "error")
        self._observe("e2e_request_latency_seconds", record.ended - record.arrival)
        if record.scheduled is not None:
            self._observe("request_queue_time_seconds", record.scheduled - record.arrival)
        if record.scheduled is not None and record.first_token is not None:
            self._observe("request_prefill_time_seconds", record.first_token - record.scheduled)
        if record.first_token is not None:
            self._observe("request_decode_time_seconds", record.ended - record.first_token)

    def engine_ended(self, statistics: Statistics, engine: int = 0) -> None:
        """The next engine of that number counts from 0 again. statistics: the newest of the one that has ended, which
        count no more, whoever renders them."""
        self._former_engines[engine] = self._engine_counts(engine, statistics)
        self._ended.add(engine)

    def engine_restarted(self, engine: int = 0) -> None:
        """The next engine of that number is ready. All API processes see it, so the first one counts it."""
        self._ended.discard(engine)
        if self._worker == 0:
            self._count("engine_restarts")

    def render(self, *engines: Statistics) -> bytes:
        """All series in Prometheus' text format (its media type is `prometheus_client.CONTENT_TYPE_PLAIN_0_0_4`).

        engines: how each of them stands.
        """
        registry = CollectorRegistry()
        families = [*self._engine_gauges(engines), *self._engine_counters(engines), *self._request_families()]
        registry.register(_Families(families))
        return generate_latest(registry)

    def _count(self, *key: str, by: int = 1) -> None:
        self._values[self._place[key]] += by

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        """So many observations that add up to `seconds`, of equal length."""
        bounds, first = _HISTOGRAMS[name][1], self._place[name, 0]
        self._values[first + bisect_left(bounds, seconds / times)] += times
        self._values[first + len(bounds) + 1] += seconds

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        help_text: str,
        labels: Sequence[str],
        samples: Iterable[tuple[Sequence[str], float]],
    ) -> Metric:
        """samples: values of the labels, and the number."""
        family = kind(f"strata_{name}", help_text, labels=["model_name", *labels])
        for values, number in samples:
            family.add_metric([self._model_name, *values], number)
        return family

    def _request_families(self) -> Iterable[Metric]:
        sums = self._cells.sums()

        def told(name: str, values: Iterable[_Labels]) -> list[tuple[_Labels, float]]:
            return [(value, sums[self._place[name, *value]]) for value in values]

        for name, (help_text, labels, values) in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, help_text, labels, told(name, values))
        answers = told("http_requests", [(*handler, status) for handler in self._handlers for status in _STATUSES])
        yield self._family(
            CounterMetricFamily,
            "http_requests",
            "Requests answered, by route and status.",
            ("method", "handler", "status"),
            [one for one in answers if one[1]],
        )
        of_callers = self._callers.sums()
        for at, kind in enumerate(KINDS):
            help_text = f"{_CALLER_HELP[kind]} By the name of the key."
            counts = [((caller,), counted[at]) for caller, counted in of_callers.items()]
            yield self._family(CounterMetricFamily, f"caller_{kind}", help_text, ("caller",), counts)
        for name, (help_text, bounds) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"strata_{name}", help_text, labels=["model_name"])
            first = self._place[name, 0]
            above = first + len(bounds)
            totals = accumulate(sums[first : above + 1])
            buckets = list(zip([*map(str, bounds), "+Inf"], totals, strict=True))
            histogram.add_metric([self._model_name], buckets, sum_value=sums[above + 1])
            yield histogram

    def _engine_counts(self, engine: int, statistics: Statistics) -> Counter[tuple[str, ...]]:
        """What the engines of a number have counted, as this process or any other has reported."""
        if engine in self._ended:
            statistics = Statistics()
        largest, former = self._cells.largest(), self._former_engines[engine]
        return Counter(
            {
                (name, *value): max(
                    largest[self._place[engine, name, *value]], former[name, *value] + count(statistics)
                )
                for name, (_, _, counts) in _ENGINE_COUNTERS.items()
                for value, count in counts.items()
            }
        )

    def _engine_counters(self, engines: Sequence[Statistics]) -> Iterable[Metric]:
        found = [self._engine_counts(engine, statistics) for engine, statistics in enumerate(engines)]
        for engine, counted in enumerate(found):
            for key, total in counted.items():
                self._values[self._place[engine, *key]] = total
        for name, (help_text, labels, counts) in _ENGINE_COUNTERS.items():
            samples = [
                ((str(engine), *value), counted[name, *value])
                for engine, counted in enumerate(found)
                for value in counts
            ]
            yield self._family(CounterMetricFamily, name, help_text, ("engine", *labels), samples)

    def _engine_gauges(self, engines: Sequence[Statistics]) -> Iterable[Metric]:
        for name, (help_text, value) in _ENGINE_GAUGES.items():
            found = [((str(engine),), value(statistics)) for engine, statistics in enumerate(engines)]
            told = [(labels, number) for labels, number in found if number is not None]
            yield self._family(GaugeMetricFamily, name, help_text, ("engine",), told)
        verdicts = [
            ((str(engine), one.finding, one.layer, one.cause), 1) for engine, one in enumerate(engines) if one.finding
        ]
        labels = ("engine", "finding", "layer", "cause")
        yield self._family(GaugeMetricFamily, "verdict", "What holds the engine back now: always 1.", labels, verdicts)


class _Families:
    """The families of one reading, as a registry takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
