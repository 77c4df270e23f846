"""Loads on engines with continuous batching, against counts by hand and what they must not do; means of traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from strata.plan.meta_model import find_config
from strata.plan.search.batching import SERVER_SECONDS, Batching, LoadPoint, at_concurrency, at_rate, wait_for_place
from strata.plan.search.layer_prices import LayerPrices
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import Precision
from strata.plan.search.step_table import Anchors, StepTable
from strata.plan.search.traffic import Traffic, read_traffic

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h200_peers.jsonl"
TRAFFIC = Traffic.of(500, 101)
FREE = Batching(budget=8192, target=None)


def seconds(decodes: float, prompts: float) -> float:
    """A step of 10 ms, and 10 us for each token of a prompt."""
    return 0.01 + 1e-5 * prompts


def test_a_request_alone_takes_its_own_steps() -> None:
    point = at_concurrency(seconds, TRAFFIC, FREE, 1)
    assert point.ttft == pytest.approx(SERVER_SECONDS + seconds(0, 500), rel=0.02)
    assert point.tpot == pytest.approx(0.01, rel=0.02)
    assert point.requests == pytest.approx(1 / (point.ttft + 100 * point.tpot), rel=1e-3)


@pytest.mark.parametrize("concurrency", [1, 7, 64, 500])
def test_requests_under_way_are_those_that_come_in_the_time_of_one(concurrency: int) -> None:
    """Little's law, also where prompts take all the room of steps and most requests wait."""
    point = at_concurrency(seconds, TRAFFIC, Batching(1024, 0.02), concurrency)
    assert point.requests * (point.ttft + 100 * point.tpot) == pytest.approx(concurrency, rel=1e-3)


def test_steps_compute_as_many_prompts_as_answers_end() -> None:
    point = at_concurrency(seconds, TRAFFIC, FREE, 64)
    each = point.step / (point.tpot * 100) * point.decoding  # answers that end in a step
    assert point.prompt_steps * point.chunk == pytest.approx(each * 500, rel=1e-6)
    assert point.step == pytest.approx(0.01 + 1e-5 * each * 500, rel=1e-6)


def test_more_sequences_give_more_tokens_more_slowly() -> None:
    points = [at_concurrency(lambda d, p: seconds(d, p) + 1e-5 * d, TRAFFIC, FREE, count) for count in range(1, 200, 9)]
    assert all(one.requests <= more.requests for one, more in pairwise(points))
    assert all(one.tpot <= more.tpot for one, more in pairwise(points))


def test_prompts_set_the_limit_where_steps_have_no_more_room() -> None:
    point = at_concurrency(seconds, TRAFFIC, Batching(1000, None), 10_000)
    assert point.decoding + point.chunk == pytest.approx(1000, rel=0.01)
    assert point.requests == pytest.approx(point.chunk / 500 / seconds(0, point.chunk), rel=0.01)


def test_a_rate_is_met_or_refused() -> None:
    point = at_rate(seconds, TRAFFIC, FREE, rate=20.0, most=256)
    assert point is not None
    assert point.requests == pytest.approx(20.0, rel=1e-3)
    assert point.decoding == pytest.approx(20 * 100 * point.tpot, rel=1e-3)
    assert at_rate(seconds, TRAFFIC, FREE, rate=200.0, most=256) is None  # 200 x 500 tokens at 10 us each


def test_a_wait_for_a_place_is_that_of_as_many_servers() -> None:
    """Where each of four takes a second however many there are: Erlang's C, counted by hand for three a second."""

    def alike(decoding: float) -> LoadPoint:
        return LoadPoint(decoding, decoding, decoding, 0.0, 0.0, 0.0, 0.0, 0.0)

    all_busy = 3**4 / 24 * 4
    expected = all_busy / (1 + 3 + 9 / 2 + 27 / 6 + all_busy)
    assert wait_for_place(alike, 4, 3.0) == pytest.approx(expected / (4 - 3))
    assert wait_for_place(alike, 4, 4.0) is None
    waits = [wait_for_place(alike, 4, 4 - 2.0**-near) or 0.0 for near in range(10)]
    assert all(one < more for one, more in pairwise(waits))
    assert wait_for_place(alike, 2000, 20.0) == pytest.approx(0, abs=1e-12)  # chances far below the least number


def test_a_rate_near_the_most_waits_for_places() -> None:
    most = at_concurrency(seconds, TRAFFIC, FREE, 64)
    near = at_rate(seconds, TRAFFIC, FREE, rate=0.97 * most.requests, most=64)
    assert near is not None
    assert near.waiting > 0.1
    assert near.concurrency == pytest.approx(near.requests * (near.ttft + 100 * near.tpot), rel=1e-2)  # Little's law


@pytest.mark.parametrize("rate", [0.5, 5.0, 9.0])
def test_long_prompts_leave_most_places_free(rate: float) -> None:
    """Prompts of 8,000 tokens, of which steps have no room beside a thirtieth of those that may decode."""
    point = at_rate(seconds, Traffic.of(8000, 10), FREE, rate=rate, most=1024)
    assert point is not None
    assert point.requests == pytest.approx(rate, rel=1e-3)
    assert point.waiting == pytest.approx(0, abs=1e-9)


def test_stages_take_their_share_of_the_sequences() -> None:
    """Two stages with half of the layers each: as many tokens from as many sequences, once two steps are under way."""
    one = at_concurrency(lambda _, __: 0.01, TRAFFIC, FREE, 64)
    two = at_concurrency(lambda _, __: 0.005, TRAFFIC, Batching(8192, None, stages=2), 64)
    assert two.tpot == pytest.approx(one.tpot)
    assert two.requests == pytest.approx(one.requests, rel=0.01)


def test_answers_of_one_token_are_prompts_alone() -> None:
    point = at_concurrency(seconds, Traffic.of(500, 1), Batching(1000, None), 2)
    assert point.requests == pytest.approx(2 / (seconds(0, 1000) + SERVER_SECONDS))
    assert point.tpot == 0.0


@pytest.mark.parametrize("concurrency", [1, 2, 9, 100])
@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 1), (1, 4)])
def test_prompts_alone_that_are_under_way_are_those_that_come_in_the_time_of_one(
    concurrency: int, stages: int, ranks: int
) -> None:
    """Little's law, the way over HTTP included."""
    point = at_concurrency(seconds, Traffic.of(16, 1), Batching(1000, None, stages, ranks), concurrency)
    assert point.requests * point.ttft == pytest.approx(concurrency)
    assert point.ttft >= seconds(0, 16) * stages + SERVER_SECONDS


@pytest.mark.parametrize(
    ("ranks", "scheme", "count", "tpot", "ttft"),
    [(1, None, 3, 0.06, 0.2), (2, None, 3, 0.12, 0.25), (1, "fp8", 6, 0.1, 0.22)],
)
def test_served_loads_of_8b_on_h200(
    machine: Machine, ranks: int, scheme: str | None, count: int, tpot: float, ttft: float
) -> None:
    """Mean latencies of the loads at rates that were measured, of which none made the steps' table. Over two ranks and
    in fp8 all are predicted too short."""
    config, precision = find_config("8B"), Precision(scheme)
    traffic, layout = Traffic.of(512, 128), ServingLayout(tensor=ranks)
    anchors = Anchors(LayerPrices(config, machine, layout, torch.bfloat16, precision), traffic, [precision])
    table = StepTable(anchors, config, layout, precision)
    measured = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    loads = [
        one
        for one in measured
        if (one["engine"], one["model"]) == ("strata", "8B")
        and one["data"] == "random prompts of 512 and answers of 128 tokens"
        and one["request_rate"] != "inf"
        and (one.get("tensor_parallel_size", 1), one.get("quantization")) == (ranks, scheme)
    ]
    assert len(loads) == count
    for load in loads:
        point = at_rate(table.seconds, traffic, Batching(8192, 0.02), load["request_rate"], most=256)
        assert point is not None
        assert point.tpot * 1e3 == pytest.approx(load["tpot_ms"]["mean"], rel=tpot)
        assert point.ttft * 1e3 == pytest.approx(load["ttft_ms"]["mean"], rel=ttft)


def test_means_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 100, 10), (500, 300, 30), (2000, 200, 20)]
    line = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [1]}\n'
    trace.write_text("".join(line % row for row in rows))
    found = read_traffic(trace, cached=50)
    assert (found.prompt, found.output, found.longest) == (200, 20, 330)
    assert found.rate == pytest.approx(1.0)  # two more after the first, in two seconds
    assert found.computed == 150
    # Each token of an answer looks back on its prompt and, on average, half of the answer.
    assert found.context == pytest.approx((10 * 105 + 30 * 315 + 20 * 210) / 60)


def test_a_trace_of_like_requests_is_their_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 64, "output_length": 32}\n' * 5)
    assert read_traffic(trace) == Traffic.of(64, 32)
