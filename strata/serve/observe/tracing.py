"""Traces of requests for OpenTelemetry: a span for each generation, and in it one for queue, prefill and decode.

OpenTelemetry's SDK is loaded only if an endpoint is given. A span is made when its request is over, from the times
that the metrics record anyway, so tracing costs a running request nothing.
"""

# The SDK is optional, so the types of this file are checked where it is installed.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from strata.serve.observe.metrics import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


class RequestTracer:
    """Makes spans for `processor`. What it has not sent when Python exits is sent then."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider(resource=Resource.create({"service.name": "strata"}))
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("strata.serve")
        self._model_name = model_name

    def trace(self, record: RequestRecord, request_id: str | None, traceparent: str | None) -> None:
        """Make the spans of a request that has ended, under the caller's span if its `traceparent` header named one."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})
        ahead = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            record.endpoint,
            caller,
            SpanKind.SERVER,
            attributes={
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": request_id or "",
                "gen_ai.response.finish_reasons": [record.reason],
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "strata.cached_tokens": record.cached_tokens,
            },
            start_time=ahead + _nanoseconds(record.arrival),
        )
        inside = set_span_in_context(span)
        for name, start, end in _phases(record):
            phase = self._tracer.start_span(name, inside, start_time=ahead + _nanoseconds(start))
            phase.end(ahead + _nanoseconds(end))
        span.end(ahead + _nanoseconds(record.ended))


def make_tracer(endpoint: str | None, model_name: str) -> RequestTracer | None:
    """A tracer that sends OTLP over HTTP to `endpoint`, in batches from a thread of its own; None without one.

    Raises ValueError if OpenTelemetry's packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint {endpoint}: install {_PACKAGES} to send traces ({error})") from error
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint)), model_name)


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """(name, start, end) of the phases that a request went through; the last one that it reached ends with it."""
    marks = [("queue", record.arrival), ("prefill", record.scheduled), ("decode", record.first_token)]
    reached = [(name, at) for name, at in marks if at is not None]
    ends = [at for _, at in reached[1:]] + [record.ended]
    return [(name, start, end) for (name, start), end in zip(reached, ends, strict=True)]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
