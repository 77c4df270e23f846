"""What the picture of the results shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plot_gaps import HERE, MODELS, TESTS, bar, bars, newest


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
