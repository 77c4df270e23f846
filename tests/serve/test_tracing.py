"""Traces: spans with the request's own times, under the caller's span; one clear error without OpenTelemetry."""

from __future__ import annotations

import builtins
import time
from typing import Any

import pytest

from strata.serve.metrics import RequestRecord
from strata.serve.tracing import RequestTracer, make_tracer


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert make_tracer(None, "m") is None


def test_without_the_packages_the_flag_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="--otlp-traces-endpoint http://collector:4318: install opentelemetry-sdk "):
        make_tracer("http://collector:4318", "m")


def traced(record: RequestRecord, traceparent: str | None = None) -> dict[str, Any]:
    """The spans of one request by name."""
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="opentelemetry-sdk is not installed"
    )
    exporter = memory.InMemorySpanExporter()
    tracer = RequestTracer(exporter, "m")
    tracer.trace(record, "req-1", traceparent)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_have_the_times_of_the_request() -> None:
    now = time.monotonic()
    spans = traced(RequestRecord("chat", "stop", now - 3.0, now - 2.8, now - 2.4, now, 12, 8, 40))
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"queue": 0.2, "prefill": 0.4, "decode": 2.4, "chat": 3.0}, abs=1e-6)
    whole = spans["chat"]
    assert abs(whole.end_time / 1e9 - time.time()) < 5.0
    assert all(spans[phase].parent.span_id == whole.context.span_id for phase in ("queue", "prefill", "decode"))
    assert spans["queue"].start_time == whole.start_time
    assert whole.attributes["gen_ai.usage.output_tokens"] == 40
    assert whole.attributes["gen_ai.response.id"] == "req-1"


def test_a_request_that_left_the_queue_has_no_other_phase() -> None:
    now = time.monotonic()
    spans = traced(RequestRecord("chat", "abort", now - 1.0, None, None, now, 12, 0, 0))
    assert set(spans) == {"chat", "queue"}
    assert (spans["queue"].end_time - spans["queue"].start_time) / 1e9 == pytest.approx(1.0, abs=1e-6)


def test_a_request_is_part_of_its_callers_trace() -> None:
    now = time.monotonic()
    record = RequestRecord("chat", "stop", now - 1.0, now - 0.9, now - 0.5, now, 12, 0, 4)
    spans = traced(record, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    assert spans["chat"].context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert spans["chat"].parent.span_id == 0xB7AD6B7169203331
    assert traced(record, "nonsense")["chat"].parent is None
