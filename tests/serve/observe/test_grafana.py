"""The Grafana dashboard: it asks only for series that the server has, and its panels fit together."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import strata
from strata.engine.process.messages import Statistics
from strata.serve.observe.metrics import Metrics

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
