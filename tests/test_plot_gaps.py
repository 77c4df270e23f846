"""What the picture of the results shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot_gaps import HERE, MODELS, TESTS, bar, bars, draw_served, newest, served


def test_the_newest_line_of_a_test_counts(tmp_path: Path) -> None:
    lines = [
        ("T1", "8B", "bf16", 9000),
        ("T1", "8B", "fp8", 12000),
        ("T1", "0.6B", "bf16", 2),
        ("T1", "8B", "bf16", 10000),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(("test", "model", "dtype", "value"), line, strict=True))) + "\n" for line in lines)
    )
    found = newest(path)
    assert {key: line["value"] for key, line in found.items()} == {("T1", "8B"): 10000, ("T1", "0.6B"): 2}


def test_shares_are_of_the_floors_speed() -> None:
    assert bar({"value": 50.0, "unit": "tok/s"}, floor=200.0).share == pytest.approx(0.25)
    assert bar({"value": 5.0, "unit": "ms"}, floor=4.0).share == pytest.approx(0.8)


@pytest.mark.parametrize(("value", "label"), [(1.0583, "1.06"), (402_062, "402k"), (23_185, "23.2k"), (9_606, "9,606")])
def test_labels_are_short(value: float, label: str) -> None:
    assert bar({"value": value, "unit": "tok/s"}, floor=value).label == label


def test_every_test_has_figures_and_none_beats_its_floor() -> None:
    found = bars(HERE / "results" / "h200.jsonl", HERE / "results" / "h200_vllm.jsonl")
    assert {model: set(tests) for model, tests in found.items()} == {model: set(TESTS) for model in MODELS}
    shares = [one.share for tests in found.values() for pair in tests.values() for one in pair]
    assert all(0 < share < 1 for share in shares)


def served_line(model: str, rate: float, queueing: float) -> dict[str, Any]:
    parts = {"queueing": {"p50": queueing, "p99": 2 * queueing}, "delivery": {"p50": 1.0, "p99": -0.1}}
    return {
        "test": "T5",
        "model": model,
        "request_rate": rate,
        "ttft_ms": {"parts": parts},
        "tpot_ms": {"parts": parts},
    }


def test_latencies_of_the_newest_served_loads_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "gaps.jsonl", tmp_path / "served.svg"
    lines = [served_line("0.6B", 55, 1), served_line("0.6B", 110, 2), served_line("0.6B", 55, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"test": "T1", "model": "8B"}, *lines]))
    found = served(path)
    assert found == [lines[2], lines[1]]
    draw_served(found, picture)
    drawn = picture.read_text()
    assert all(name in drawn for name in ("0.6B, 55/s, p50", "0.6B, 110/s, p99", "queueing", "delivery"))
