"""Traces: spans with the request's own times, under the caller's span; one clear error without OpenTelemetry."""

from __future__ import annotations

import builtins
import gzip
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from strata.serve.observe.metrics import RequestRecord
from strata.serve.observe.tracing import RequestTracer, make_tracer


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
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    RequestTracer(export.SimpleSpanProcessor(exporter), "m").trace(record, "req-1", traceparent)
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


def test_spans_reach_a_collector_before_the_process_ends() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is not installed")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    code = """
import sys, time
from strata.serve.observe.metrics import RequestRecord
from strata.serve.observe.tracing import make_tracer
now = time.monotonic()
make_tracer(sys.argv[1], "m").trace(RequestRecord("chat", "stop", now - 1, now, now, now, 12, 8, 40), "req-42", None)
"""
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        subprocess.run([sys.executable, "-c", code, endpoint], check=True, timeout=60)
        server.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    sent = gzip.decompress(received[0][1]) if received[0][1][:2] == b"\x1f\x8b" else received[0][1]
    assert all(word in sent for word in (b"strata.serve", b"prefill", b"req-42"))
