"""Predicted steps by hand: what was measured, what follows from the roofline, messages and launches."""

from __future__ import annotations

from typing import Any

import pytest

from strata.graph.cost import NodeCost
from strata.graph.predict import StepPredictor
from strata.hardware.figures import Device, Figure, Source, promised
from strata.hardware.links import Link
from strata.hardware.prediction import Prediction
from strata.hardware.roofline import Cost, Workload
from strata.kernels.tuned import Choice, Key, Table

# 100 TFLOP/s, 1 TB/s; a kernel takes 2 us in a graph, and 10 us of the host.
DEVICE = Device(
    "a",
    "a device",
    promised(Source("", "", ""), bandwidth=1.0, dense={"bfloat16": 100})
    + tuple(Figure(name, value, "", "", measured=True) for name, value in (("kernel", 2e-6), ("launch", 10e-6))),
)
TABLE: Table = {
    Key(operation, "bfloat16", 4096, 1024, rows): Choice("skinny", {}, seconds, seconds)
    for operation, rows, seconds in (("linear", 4, 12e-6), ("linear", 16, 16e-6), ("linear_add", 4, 14e-6))
}
DECODES = Workload((1,) * 4, (100,) * 4)


def node(operation: str, rows: int = 0, kernels: int = 1, **cost: int) -> NodeCost:
    """A product of so many rows, or, without rows, whatever has the cost."""
    weight = (4096, 1024) if rows else None
    found = Cost(2 * rows * 4096 * 1024, 2 * 4096 * 1024, weights=2 * 4096 * 1024) if rows else Cost(**cost)
    return NodeCost(operation, operation, 0, "", found, (1,), {}, "", ("a kernel",) * kernels, weight)


def predictor(**more: Any) -> StepPredictor:
    return StepPredictor.of(DEVICE, "bfloat16", TABLE, **more)


def test_products_take_what_their_operation_took() -> None:
    found = predictor()
    assert found.node(node("linear", 4), DECODES) == Prediction(pytest.approx(12e-6), "measured")
    assert found.node(node("linear_add", 4), DECODES) == Prediction(pytest.approx(14e-6), "measured")
    # Of an operation that nobody measured, the product alone; between the numbers of rows.
    other = found.node(node("linear_silu_mul", 8), DECODES)
    assert other.origin == "interpolated"
    assert 12e-6 < other.seconds < 16e-6


def test_whatever_else_is_the_roofline_and_no_less_than_its_kernels() -> None:
    found = predictor()
    assert found.node(node("norm", read=5 * 10**6), DECODES) == Prediction(pytest.approx(5e-6), "analytic")
    assert found.node(node("norm", read=100, kernels=2), DECODES) == Prediction(pytest.approx(4e-6), "analytic")


def test_decode_attention_is_by_sequences_and_bytes_of_each() -> None:
    calls = [("decode", "bfloat16", (count, 2, 10**6), count * 1e-6 + 8e-6) for count in (4, 16)]
    attention = node("attention", flops=8 * 10**6, read=4 * 10**6, cached=4 * 10**6)
    assert predictor(calls=calls).node(attention, DECODES) == Prediction(pytest.approx(12e-6), "measured")
    assert predictor().node(attention, DECODES) == Prediction(pytest.approx(4e-6), "analytic")
    prompt = Workload((4,), (4,))  # attends otherwise
    assert predictor(calls=calls).node(attention, prompt) == Prediction(pytest.approx(4e-6), "analytic")


def test_messages_take_their_links_time() -> None:
    reduced = node("all_reduce", messages=1, sent=10**6)
    linked = predictor(link=Link(20e-6, 3e-6, 1e11, "", ""))
    assert linked.node(reduced, DECODES) == Prediction(pytest.approx(13e-6), "analytic")


def test_a_step_is_the_sum_or_waits_for_the_host() -> None:
    nodes = [node("linear", 4), node("linear_add", 4), node("norm", read=100)]
    assert predictor().step(nodes, DECODES, recorded=True) == Prediction(pytest.approx(28e-6), "analytic")
    assert predictor().step(nodes[:2], DECODES, recorded=True).origin == "measured"
    assert predictor().step(nodes, DECODES, recorded=False) == Prediction(pytest.approx(30e-6), "analytic")
