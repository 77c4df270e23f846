"""Traces with the request's own times, the dashboard's queries, and the ledger that a reply tells of its time."""

from __future__ import annotations

import builtins
import gzip
import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import strata
from strata.engine.process.messages import Statistics
from strata.serve.observe.metrics import Metrics, RequestRecord
from strata.serve.observe.tracing import RequestTracer, make_tracer
from tests.serve.live import LiveServer
from tests.serve.scripted import EOS, Serve, delta, events


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
    spans = traced(RequestRecord("chat", "stop", now - 3.0, now, 12, now - 2.8, now - 2.4, 8, 40))
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
    spans = traced(RequestRecord("chat", "abort", now - 1.0, now, 12))
    assert set(spans) == {"chat", "queue"}
    assert (spans["queue"].end_time - spans["queue"].start_time) / 1e9 == pytest.approx(1.0, abs=1e-6)


def test_a_request_is_part_of_its_callers_trace() -> None:
    now = time.monotonic()
    record = RequestRecord("chat", "stop", now - 1.0, now, 12, now - 0.9, now - 0.5, 0, 4)
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
make_tracer(sys.argv[1], "m").trace(RequestRecord("chat", "stop", now - 1, now, 12, now, now, 8, 40), "req-42", None)
"""
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        subprocess.run([sys.executable, "-c", code, endpoint], check=True, timeout=60)
        server.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    sent = gzip.decompress(received[0][1]) if received[0][1][:2] == b"\x1f\x8b" else received[0][1]
    assert all(word in sent for word in (b"strata.serve", b"prefill", b"req-42"))


DASHBOARD = json.loads((Path(strata.__file__).parent.parent / "docs" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of every sample's name."""
    found: dict[str, set[str]] = {}
    metrics = Metrics("m")
    metrics.received("chat", "alice")
    metrics.answered(0, 404)
    told = Statistics(floor_share=0.4, gap_share=0.1, predicted_ratio=1.0, finding="slots", layer="system", cause="x")
    for family in text_string_to_metric_families(metrics.render(told).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_queries_are_of_series_that_there_are(series: dict[str, set[str]], query: str) -> None:
    names = re.findall(r"strata_\w+", query)
    assert names
    assert set(names) <= set(series)
    for labels in re.findall(r"by \((\w+)\)", query):
        assert any(labels in series[name] for name in names), labels
    assert query.count('{model_name=~"$model"}') == len(names), "the model chosen on top holds for all of it"
    assert query.count("(") == query.count(")")
    counters = [name for name in names if name.endswith(("_total", "_bucket", "_sum", "_count"))]
    assert len(re.findall(r"(rate|increase)\(", query)) == len(counters), "a counter is read by its growth, alone"


def test_what_operators_look_for_is_there() -> None:
    asked = set(re.findall(r"strata_(\w+)", " ".join(QUERIES)))
    assert asked >= {
        "verdict", "step_floor_share", "step_gap_share", "compilations_after_ready_total", "engine_restarts_total",
        "http_requests_total", "caller_requests_total", "caller_prompt_tokens_total", "caller_generation_tokens_total",
    }  # fmt: skip


def test_the_data_source_is_chosen_on_top() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    sources = [panel["datasource"]["uid"] for panel in PANELS]
    sources += [target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]]
    assert set(sources) == {"${datasource}"}
    assert "id" not in DASHBOARD, "Grafana gives one when it imports"


def test_panels_have_units_and_do_not_overlap() -> None:
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)

    def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        return not beside and not above

    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not any(overlap(one, other) for one, other in combinations(places, 2))


CHAT = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
LONG = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 700}


def adds_up(ledger: dict[str, Any]) -> dict[str, float]:
    """The parts of its only generation."""
    (one,) = ledger["generations"]
    assert sum(one["parts"].values()) == pytest.approx(one["seconds"], rel=1e-6)
    assert sum(one["first_token_parts"].values()) == pytest.approx(one["time_to_first_token"], rel=1e-6)
    parts: dict[str, float] = one["parts"]
    return parts


def test_the_answer_tells_where_its_time_went(live: LiveServer) -> None:
    shares = []
    for _ in range(5):  # what else this machine does, and only that, differs from one time to the next
        began = time.monotonic()
        answer = live.post("/v1/chat/completions", **CHAT, max_tokens=20, ledger=True)
        took = time.monotonic() - began
        (told,) = answer["ledger"]["generations"]
        shares.append(told["seconds"] / took)
        if shares[-1] > 0.3:
            break
    assert max(shares) > 0.3
    assert max(shares) < 1
    parts = adds_up(answer["ledger"])
    assert {"text", "inbox", "prompt", "decode", "host_gap", "delivery"} <= parts.keys()
    assert told["output_tokens"] == answer["usage"]["completion_tokens"]
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["decode_steps"] == told["output_tokens"] - 1
    assert (answer["ledger"]["model"], answer["ledger"]["device"]) == (answer["model"], "cpu")
    asked = live.client.get(f"/requests/{answer['id']}").json()
    assert asked["generations"] == answer["ledger"]["generations"]
    assert live.client.get(f"/requests/{answer['ledger']['id']}").json() == answer["ledger"]


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_chunk_of_a_stream_has_it(live: LiveServer, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "Once upon"})):
        fields = {**body, "stream": True, "max_tokens": 5, "ledger": True, **options}
        text = live.client.post(f"/v1/{path}", json=fields).text
        *chunks, last, done = events(text)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert ("usage" in last) == usage
        assert not any("ledger" in chunk for chunk in chunks)
        adds_up(last["ledger"])


def test_stop_strings_and_several_samples_and_prompts(live: LiveServer) -> None:
    answer = live.post("/v1/completions", prompt="Once upon a time", max_tokens=60, stop=" the", ledger=True)
    adds_up(answer["ledger"])
    assert answer["ledger"]["generations"][0]["finish_reason"] == "stop"
    answer = live.post("/v1/completions", prompt=["One", "Two"], n=2, max_tokens=9, ignore_eos=True, ledger=True)
    assert len(answer["ledger"]["generations"]) == 2
    for one in answer["ledger"]["generations"]:
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        assert one["output_tokens"] == 9


def test_one_that_runs_and_one_whose_client_leaves(live: LiveServer) -> None:
    headers = {"x-request-id": "the-long-one"}
    with live.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        running = live.client.get("/requests/the-long-one").json()
        assert running["generations"][0]["finish_reason"] is None
        assert "decode" in adds_up(running)
    live.wait_until(lambda: live.idle)
    adds_up(ended := live.client.get("/requests/the-long-one").json())
    assert ended["generations"][0]["finish_reason"] == "abort"
    assert ended["generations"][0]["seconds"] > running["generations"][0]["seconds"]


def test_an_unknown_request_and_a_field_that_is_none(live: LiveServer) -> None:
    response = live.client.get("/requests/chatcmpl-nobody")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_not_found", "not_found_error")
    assert "chatcmpl-nobody" in error["message"]
    refused = live.client.post("/v1/completions", json={"prompt": "a", "ledger": "yes"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "ledger"


def test_of_a_server_without_ledgers(serve_script: Serve) -> None:
    with serve_script([[delta(0, [EOS], "stop")]]) as server:
        answer = server.complete(ledger=True)
        assert answer["ledger"]["generations"] == []
        assert server.engine.streams[0].ended is not None
        assert "ledger" not in server.complete()
        (began, names) = server.engine.added[0].began, server.engine.added[0].names
        assert 0 < began <= server.engine.added[0].arrival
        assert names == [f"anonymous/{answer['ledger']['id']}", f"anonymous/{answer['id']}"]
        server.engine.alive = False
        dead: httpx.Response = server.client.get("/requests/x")
        assert dead.status_code == 404
