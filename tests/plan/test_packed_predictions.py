"""Predicted steps of packed weights, and of experts in floats, against runs of an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strata.bench.workloads import ideal_steps, named
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.plan.meta_model import find_config
from strata.plan.search.layer_prices import LayerPrices
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import Precision

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_precision.jsonl"


def seconds(prices: LayerPrices, test: str) -> float:
    """Of a test: prompts by 8,192 tokens; of the steps of one sequence the first, the middle and the last decode count
    for all."""
    made = named(test)
    if test == "T4":
        return 4 * prices.price(Workload((2048,) * 4, (2048,) * 4)).seconds
    prompt, *decodes = ideal_steps(made.prompt_lengths, made.outputs)
    few = [decodes[0], decodes[len(decodes) // 2], decodes[-1]]
    return prices.price(prompt).seconds + len(decodes) * sum(prices.price(one).seconds for one in few) / len(few)


@pytest.mark.parametrize(("scheme", "tests"), [("fp8", ("T2", "T4")), ("int4", ("T2",))])
def test_runs_of_8b(scheme: str, tests: tuple[str, ...]) -> None:
    h200 = device("h200")
    machine = Machine.of(h200, "bfloat16", per_host=8, network=50e9)
    prices = LayerPrices(find_config("8B"), machine, ServingLayout(), torch.bfloat16, Precision(scheme))
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    runs = (line for line in lines if line.get("dtype") == scheme and line["model"] == "8B")
    took = {line["test"]: line["value"] for line in runs}  # the newest
    for test in tests:
        assert named(test).value(seconds(prices, test)) == pytest.approx(took[test], rel=0.02), test


@pytest.mark.parametrize(
    ("model", "test", "off"),
    [("30B-A3B", "T2", 0.08), ("30B-A3B", "T4", 0.12), ("gpt-oss-20b", "T2", 0.1), ("V2-Lite", "T4", 0.1)],
)
def test_runs_of_mixtures_in_floats(model: str, test: str, off: float) -> None:
    """Experts in floats take the launches and rates of packed ones, and were fitted to none of these: the choice of a
    token, and prompts whose tokens reach all."""
    h200 = device("h200")
    machine = Machine.of(h200, "bfloat16", per_host=8, network=50e9)
    prices = LayerPrices(find_config(model), machine, ServingLayout(), torch.bfloat16, Precision(None))
    lines = [json.loads(line) for line in (RESULTS.parent / "h200_mixtures.jsonl").read_text().splitlines()]
    runs = (line for line in lines if line["model"] == model and line.get("engine", "strata") == "strata")
    took = {line["test"]: line["value"] for line in runs}  # the newest
    assert named(test).value(seconds(prices, test)) == pytest.approx(took[test], rel=off)
