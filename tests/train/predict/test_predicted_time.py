"""Predicted steps against steps that were measured on H200s (benchmarks/results/h200_train.jsonl)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.cost.training_rates import TRAINING_RATES
from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.parallel.layout import Layout
from strata.train.predict.estimate import estimate, memory
from strata.train.predict.min_time import min_time, predicted_time
from strata.train.predict.step_shape import TrainShape

H200, GIB = device("h200"), 2**30
RESULTS = Path(__file__).parents[3] / "benchmarks/results/h200_train.jsonl"


def measured() -> list[dict[str, Any]]:
    """All that can be predicted."""
    rows = map(json.loads, RESULTS.read_text().splitlines())
    return [row for row in rows if row["optimizer"] == "adamw"]


# Steps of the graph by the code as it is since f82237a, and T6, whose code has not changed since.
ROWS = [row for row in measured() if row["commit"] == "f82237a" or row["test"] == "T6"]


def shape_of(row: dict[str, Any]) -> TrainShape:
    layout = Layout(**row["layout"])
    config = config_from_dict(SHAPES[row["shape"]], row["shape"])
    tokens = row["batch"] * row["sequence"]
    return TrainShape(config, tokens, row["sequence"], layout.micro_batches, row["precision"], layout, row["offload"])


def test_there_are_as_many_as_were_measured() -> None:
    assert len(ROWS) == 11


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['shape']}-{row['precision']}-{row['ranks']}")
def test_within_five_percent_and_memory_within_four(row: dict[str, Any]) -> None:
    shape = shape_of(row)
    found = estimate(shape, H200, row["recompute"])
    assert found.likely_tokens_per_second / row["ranks"] == pytest.approx(row["value"], rel=0.05)
    assert found.fullest.total / GIB == pytest.approx(row["memory_gib"], rel=0.04)
    assert found.likely.origin == "interpolated"
    assert found.likely_mfu == pytest.approx(row["mfu"], rel=0.06)


FSDP = [row for row in measured() if row["layout"]["zero"] == 3]


@pytest.mark.parametrize("row", FSDP, ids=lambda row: f"{row['sequence']}-{row['ranks']}")
def test_memory_of_fsdp_within_four_percent(row: dict[str, Any]) -> None:
    assert memory(shape_of(row), row["recompute"]).total / GIB == pytest.approx(row["memory_gib"], rel=0.04)


def test_parts_add_up_and_none_is_quicker_than_the_least() -> None:
    shape = TrainShape(config_from_dict(SHAPES["8B"], "8B"), 16384, 8192, 2, layout=Layout(shard=8, zero=3))
    for recompute in shape.recomputes:
        likely, least = predicted_time(shape, recompute, H200), min_time(shape, recompute, H200)
        assert likely.seconds == pytest.approx(sum(likely.by_kind.values()))
        assert all(likely.by_kind[kind] >= seconds for kind, seconds in least.by_kind.items())
        assert {name: one.cost for name, one in likely.messages.items()} == {
            name: one.cost for name, one in least.messages.items()
        }


def test_another_device_reaches_the_same_share_of_what_its_maker_promises() -> None:
    shape = TrainShape(config_from_dict(SHAPES["8B"], "8B"), 8192, 8192)
    here, there = (predicted_time(shape, "none", device(key)) for key in ("h200", "a100"))
    assert there.origin == "analytic"
    assert there.products / here.products == pytest.approx(989.4 / 312)
    assert there.traffic / here.traffic == pytest.approx(4.8 / 2.039)


def test_a_wider_model_than_was_measured_says_so() -> None:
    shape = TrainShape(config_from_dict(SHAPES["70B"], "70B"), 8192, 8192, layout=Layout(shard=8, zero=3))
    assert predicted_time(shape, "layers", H200).origin == "analytic"
    assert TRAINING_RATES["h200"].wide.utilization(8192) == TRAINING_RATES["h200"].wide.utilization(4096)


def test_conversion_to_8_bits_costs_passes_over_memory() -> None:
    """Of a product [n, width] by [out, width] six bytes an element: the input, the weight, the result's gradient."""
    config = config_from_dict(SHAPES["1B"], "1B")
    plain = TrainShape(config, 16384, 8192)
    tokens = 16384
    per_layer = tokens * (2048 + 2048 + 2048 + 8192) + 2048 * (3072 + 2048 + 3 * 8192)
    per_layer += tokens * (3072 + 2048 + 2 * 8192 + 2048)
    seconds = 16 * 6 * per_layer / TRAINING_RATES["h200"].traffic
    wide, narrow = (predicted_time(one, "none", H200).traffic for one in (plain, replace(plain, precision="fp8-row")))
    assert narrow - wide == pytest.approx(seconds)
