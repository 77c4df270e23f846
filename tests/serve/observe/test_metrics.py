"""Metrics: what Prometheus' own parser reads back, the sum over processes, and the cost on the hot path."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from strata.engine.process.messages import Statistics, ended
from strata.serve.api.server_routes import observation_router
from strata.serve.observe.handlers import Handlers
from strata.serve.observe.metrics import ENDPOINTS, REJECTIONS, Metrics, RequestRecord

# vLLM's names that the server tells as well, less their prefix.
VLLM_NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "corrupted_requests",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
}  # fmt: skip


def samples(rendered: bytes) -> dict[str, float]:
    """`name{labels}` without the model's name and the first engine's number, of every sample."""
    read = {}
    for family in text_string_to_metric_families(rendered.decode()):
        for sample in family.samples:
            without = {"model_name": sample.labels["model_name"], "engine": "0"}
            labels = {name: value for name, value in sample.labels.items() if without.get(name) != value}
            read[sample.name + "".join(f"{{{name}={value}}}" for name, value in labels.items())] = sample.value
    return read


def record(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "endpoint": "chat", "reason": "stop", "arrival": 100.0, "scheduled": 100.2, "first_token": 100.6,
        "ended": 103.0, "prompt_tokens": 12, "cached_tokens": 4, "output_tokens": 30,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_names_are_vllms_and_every_series_names_the_model() -> None:
    families = list(text_string_to_metric_families(Metrics("tiny").render(Statistics()).decode()))
    names = {family.name.removeprefix("strata_") for family in families}
    assert names >= VLLM_NAMES | {"aborts", "rejects"}
    assert all(family.name.startswith("strata_") and family.documentation for family in families)
    assert all(sample.labels["model_name"] == "tiny" for family in families for sample in family.samples)


def test_engine_values_are_the_newest_statistics() -> None:
    told = Statistics(
        running=3, waiting=7, kv_usage=0.25, prefix_queries=100, prefix_hits=64, preemptions=2, steps=11, failed=1
    )
    read = samples(Metrics("m").render(told))
    assert read["strata_num_requests_running"] == 3
    assert read["strata_num_requests_waiting"] == 7
    assert read["strata_kv_cache_usage_perc"] == 0.25
    assert read["strata_prefix_cache_queries_total"] == 100
    assert read["strata_prefix_cache_hits_total"] == 64
    assert read["strata_num_preemptions_total"] == 2
    assert read["strata_corrupted_requests_total"] == 1


def test_the_verdict_and_the_share_of_the_floor() -> None:
    told = Statistics(floor_share=0.4, gap_share=0.25, finding="host gaps", layer="system", cause="host")
    read = samples(Metrics("m").render(told))
    assert read["strata_step_floor_share"] == 0.4
    assert read["strata_step_gap_share"] == 0.25
    assert "strata_step_predicted_ratio" not in read, "the device is not known"
    verdicts = {name: value for name, value in read.items() if name.startswith("strata_verdict")}
    assert verdicts == {"strata_verdict{cause=host}{finding=host gaps}{layer=system}": 1}
    resting = samples(Metrics("m").render(ended(told)))
    assert not [name for name in resting if name.startswith(("strata_verdict", "strata_step_"))]


def test_counters() -> None:
    metrics = Metrics("m")
    metrics.received("chat", "alice")
    metrics.received("chat", "alice")
    metrics.received("detokenize", "bob")
    metrics.rejected("queue_full")
    metrics.aborted()
    metrics.tokens(prompt=12, output=1, caller="alice")
    metrics.tokens(prompt=0, output=5, caller="bob")
    read = samples(metrics.render(Statistics()))
    assert read["strata_requests_total{endpoint=chat}"] == 2
    assert read["strata_requests_total{endpoint=detokenize}"] == 1
    assert read["strata_rejects_total{reason=queue_full}"] == 1
    assert read["strata_aborts_total"] == 1
    assert read["strata_prompt_tokens_total"] == 12
    assert read["strata_generation_tokens_total"] == 6
    of_callers = {name: value for name, value in read.items() if name.startswith("strata_caller_")}
    assert of_callers == {
        "strata_caller_requests_total{caller=alice}": 2,
        "strata_caller_requests_total{caller=bob}": 1,
        "strata_caller_prompt_tokens_total{caller=alice}": 12,
        "strata_caller_prompt_tokens_total{caller=bob}": 0,
        "strata_caller_generation_tokens_total{caller=alice}": 1,
        "strata_caller_generation_tokens_total{caller=bob}": 5,
    }
    totals = [value for name, value in read.items() if re.match(r"strata_(requests|rejects)_total", name)]
    assert len(totals) == len(ENDPOINTS) + len(REJECTIONS)
    assert sum(totals) == 4


def test_answers_are_counted_by_route_and_status_and_nothing_that_a_client_makes_up_is_a_label() -> None:
    app = FastAPI()
    for path in ("/things", "/things/{id}", "/files/{name:path}"):
        app.add_api_route(path, lambda: None, methods=["GET", "POST"], name=path)
    found = Handlers(app.routes)
    metrics = Metrics("m", handlers=found.names)
    seen = [
        ("GET", "/things", 200), ("HEAD", "/things", 200), ("POST", "/things", 429), ("GET", "/things/7", 404),
        ("GET", "/things/8", 404), ("GET", "/files/a/b/c", 200), ("GET", "/files/a/b/c", None),
        ("GET", "/etc/passwd", 404), ("BREW", "/things", 405), ("GET", "/things", 418),
    ]  # fmt: skip
    for method, path, status in seen:
        metrics.answered(found.place(method, path), status)
    read = samples(metrics.render(Statistics()))
    counted = {name: value for name, value in read.items() if name.startswith("strata_http_requests_total") and value}
    assert counted == {
        "strata_http_requests_total{handler=/things}{method=GET}{status=200}": 2,
        "strata_http_requests_total{handler=/things}{method=GET}{status=other}": 1,
        "strata_http_requests_total{handler=/things}{method=POST}{status=429}": 1,
        "strata_http_requests_total{handler=/things/{id}}{method=GET}{status=404}": 2,
        "strata_http_requests_total{handler=/files/{name:path}}{method=GET}{status=200}": 1,
        "strata_http_requests_total{handler=/files/{name:path}}{method=GET}{status=none}": 1,
        "strata_http_requests_total{handler=other}{method=other}{status=404}": 1,
        "strata_http_requests_total{handler=other}{method=other}{status=405}": 1,
    }


def test_phases_of_a_request() -> None:
    metrics = Metrics("m")
    metrics.finished(record())
    read = samples(metrics.render(Statistics()))
    sums = {
        "request_queue_time_seconds": 0.2,
        "request_prefill_time_seconds": 0.4,
        "request_decode_time_seconds": 2.4,
        "e2e_request_latency_seconds": 3.0,
    }
    for name, seconds in sums.items():
        assert read[f"strata_{name}_sum"] == pytest.approx(seconds)
        assert read[f"strata_{name}_count"] == 1
    assert read["strata_request_success_total{finished_reason=stop}"] == 1


def test_a_request_that_left_the_queue_has_no_later_phase() -> None:
    metrics = Metrics("m")
    metrics.finished(record(reason="abort", scheduled=None, first_token=None))
    read = samples(metrics.render(Statistics()))
    assert read["strata_request_success_total{finished_reason=abort}"] == 1
    assert read["strata_e2e_request_latency_seconds_count"] == 1
    for phase in ("queue", "prefill", "decode"):
        assert read[f"strata_request_{phase}_time_seconds_count"] == 0


@pytest.mark.parametrize("seconds", [0.0, 0.0009, 0.001, 0.0011, 0.42, 1000.0, 5000.0])
def test_an_observation_is_in_the_buckets_not_below_it(seconds: float) -> None:
    metrics = Metrics("m")
    metrics.first_token(seconds)
    read = samples(metrics.render(Statistics()))
    name = "strata_time_to_first_token_seconds"
    for sample, value in read.items():
        found = re.fullmatch(rf"{name}_bucket{{le=(.+)}}", sample)
        if found:
            assert value == (1 if seconds <= float(found[1]) else 0), sample
    assert read[f"{name}_sum"] == seconds
    assert read[f"{name}_count"] == 1


def test_tokens_that_came_together_are_as_many_gaps() -> None:
    metrics = Metrics("m")
    metrics.inter_token(0.012, 4)
    read = samples(metrics.render(Statistics()))
    assert read["strata_inter_token_latency_seconds_count"] == 4
    assert read["strata_inter_token_latency_seconds_sum"] == pytest.approx(0.012)
    assert read["strata_inter_token_latency_seconds_bucket{le=0.003}"] == 4
    assert read["strata_inter_token_latency_seconds_bucket{le=0.002}"] == 0


def test_any_process_renders_the_sum_of_all(tmp_path: Path) -> None:
    first, second = Metrics("m", tmp_path, 0), Metrics("m", tmp_path, 1)
    first.received("chat", "alice")
    second.received("chat", "alice")
    second.received("tokenize", "a-key.that_came-later")
    second.first_token(0.3)
    for metrics in (first, second):
        read = samples(metrics.render(Statistics(running=5)))
        assert read["strata_requests_total{endpoint=chat}"] == 2
        assert read["strata_caller_requests_total{caller=alice}"] == 2
        assert read["strata_caller_requests_total{caller=a-key.that_came-later}"] == 1
        assert read["strata_time_to_first_token_seconds_count"] == 1
        assert read["strata_num_requests_running"] == 5, "the engine is one, however many processes ask it"


def test_counters_of_the_engine_fall_neither_from_process_to_process_nor_with_the_engine(tmp_path: Path) -> None:
    """Each process has heard from the engine at another time; then the engine ends, and another begins to count."""
    first, second = Metrics("m", tmp_path, 0), Metrics("m", tmp_path, 1)
    behind = Statistics(prefix_queries=80, prefix_hits=40, preemptions=1, steps=90, failed=0)
    newest = Statistics(prefix_queries=99, prefix_hits=48, preemptions=2, steps=100, failed=1)
    scrapes = [(first, newest), (second, behind), (first, newest), (second, newest)]
    tellings = [samples(metrics.render(told)) for metrics, told in scrapes]
    first.engine_ended(newest)
    second.engine_ended(behind)
    tellings += [samples(metrics.render(told)) for metrics, told in scrapes]
    assert tellings[-1]["strata_engine_steps_total"] == 100, "those of the one that has ended count once"
    first.engine_restarted()
    second.engine_restarted()
    restarted = [(second, Statistics()), (first, Statistics()), (first, Statistics(steps=5)), (second, Statistics())]
    tellings += [samples(metrics.render(told)) for metrics, told in restarted]
    names = [name for name in tellings[0] if name.endswith("_total")]
    assert len(names) > 5
    for earlier, later in pairwise(tellings):
        assert all(earlier[name] <= later[name] for name in names)
    assert tellings[3]["strata_engine_steps_total"] == 100
    assert tellings[-1]["strata_engine_steps_total"] == 105
    again = Metrics("m", tmp_path, 1)  # a process that was started again
    assert samples(again.render(Statistics()))["strata_engine_steps_total"] == 105


def test_each_engine_has_series_of_its_own_whose_sum_is_the_servers(tmp_path: Path) -> None:
    """One of two engines ends and is replaced; the other's numbers stay as they are."""
    metrics = Metrics("m", tmp_path, 0, engines=2)
    told = [Statistics(running=3, waiting_tokens=40, kv_usage=0.5, steps=7), Statistics(running=2, steps=9)]
    read = samples(metrics.render(*told))
    assert (read["strata_num_requests_running"], read["strata_num_requests_running{engine=1}"]) == (3, 2)
    assert (read["strata_num_tokens_waiting"], read["strata_num_tokens_waiting{engine=1}"]) == (40, 0)
    assert (read["strata_kv_cache_usage_perc"], read["strata_kv_cache_usage_perc{engine=1}"]) == (0.5, 0)
    metrics.engine_ended(told[1], 1)
    ends = samples(metrics.render(told[0], ended(told[1])))
    assert ends["strata_num_requests_running{engine=1}"] == 0
    metrics.engine_restarted(1)
    after = samples(metrics.render(told[0], Statistics(steps=5)))
    steps = [(one["strata_engine_steps_total"], one["strata_engine_steps_total{engine=1}"]) for one in (ends, after)]
    assert steps == [(7, 9), (7, 14)]
    assert after["strata_engine_restarts_total"] == 1
    families = text_string_to_metric_families(metrics.render(*told).decode())
    labels = {family.name: set(family.samples[0].labels) for family in families if family.samples}
    of_engines = {name for name, found in labels.items() if "engine" in found}
    assert of_engines == {
        *(f"strata_{name}" for name in ("num_requests_running", "num_requests_waiting", "num_tokens_waiting")),
        *(f"strata_{name}" for name in ("kv_cache_usage_perc", "recorded_sizes", "num_preemptions", "engine_steps")),
        *(f"strata_{name}" for name in ("prefix_cache_queries", "prefix_cache_hits", "corrupted_requests")),
        *(f"strata_{name}" for name in ("compilations_after_ready", "unrecorded_steps")),
    }


def test_what_a_process_counted_outlives_it(tmp_path: Path) -> None:
    code = "\n".join([
        "import os, sys, pathlib",
        "from strata.serve.observe.metrics import Metrics",
        "metrics = Metrics('m', pathlib.Path(sys.argv[1]), 1)",
        "metrics.received('chat', 'alice')",
        "os.kill(os.getpid(), 9)",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    survivor = Metrics("m", tmp_path, 0)
    assert samples(survivor.render(Statistics()))["strata_requests_total{endpoint=chat}"] == 1
    again = Metrics("m", tmp_path, 1)
    again.received("chat", "alice")
    read = samples(survivor.render(Statistics()))
    assert read["strata_requests_total{endpoint=chat}"] == read["strata_caller_requests_total{caller=alice}"] == 2


def test_route() -> None:
    app = FastAPI()
    app.include_router(observation_router)
    app.state.server = SimpleNamespace(
        metrics=Metrics("m"), client=SimpleNamespace(each_statistics=[Statistics(running=2)])
    )
    answer = TestClient(app).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert samples(answer.content)["strata_num_requests_running"] == 2


def test_bounds_hold_percentiles_within_a_third() -> None:
    """A percentile lies in one bucket; the geometric middle of that is at most so far from either end."""
    rendered = Metrics("m").render(Statistics()).decode()
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        bounds = [float(bound) for bound in re.findall(rf'{name}_bucket{{le="([^"]+)"', rendered)]
        assert bounds[-1] == math.inf
        assert all(math.sqrt(high / low) <= 1.3 for low, high in pairwise(bounds[:-1]))
