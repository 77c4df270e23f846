"""Means of traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.plan.search.traffic import Traffic, read_traffic


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
