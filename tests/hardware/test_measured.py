"""Measured calls of the package: read back as written, and those of the H200 within what is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.hardware.efficiency import EfficiencyTable
from strata.hardware.measured import path_of, read, write
from strata.hardware.prediction import Call
from strata.hardware.specs import device


def test_calls_are_read_back(tmp_path: Path) -> None:
    calls: list[Call] = [("decode", "bfloat16", (4, 2, 1000), 2e-6), ("decode", "bfloat16", (1, 2, 1000), 1e-6)]
    path = write("NVIDIA H200", "a benchmark", calls, tmp_path)
    assert path == path_of("NVIDIA H200", tmp_path) == tmp_path / "nvidia_h200.json"
    assert read("NVIDIA H200", tmp_path) == sorted(calls)
    assert read("another", tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"calls": [[1]]}', '{"other": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path_of("a", tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is no file of measured calls .*; make it anew"):
        read("a", tmp_path)


def test_decode_attention_of_the_h200() -> None:
    calls = read("NVIDIA H200")
    table = EfficiencyTable.of(device("h200"), calls)
    for kind, dtype, shape, seconds in calls:
        assert table.predict(kind, dtype, shape).seconds == pytest.approx(seconds)
        # None is above the promised bandwidth, and none takes more than 40 us beyond 4 TB/s.
        nbytes = shape[0] * shape[2]
        assert nbytes / 4.8e12 < seconds < nbytes / 4e12 + 40e-6
