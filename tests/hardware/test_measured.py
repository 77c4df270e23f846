"""Measured calls of the package: read back as written, and those of the H200 within what is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cost.efficiency import KINDS, EfficiencyTable
from strata.hardware.measured import path_of, read, write
from strata.hardware.prediction import Call, FittedTimes
from strata.hardware.specs import device


def test_calls_are_read_back(tmp_path: Path) -> None:
    decodes: list[Call] = [("decode", "bfloat16", (4, 2, 1000), 2e-6), ("decode", "bfloat16", (1, 2, 1000), 1e-6)]
    norms: list[Call] = [("traffic", "bfloat16", (1000,), 1e-6)]
    path = write("NVIDIA H200", "a benchmark", {"rms_norm": norms, "attention": decodes}, tmp_path)
    assert path == path_of("NVIDIA H200", tmp_path) == tmp_path / "nvidia_h200.json"
    assert read("NVIDIA H200", tmp_path) == {"attention": sorted(decodes), "rms_norm": norms}
    assert read("another", tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"calls": [["product", "bfloat16", [1], 1.0]]}', '{"other": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path_of("a", tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is no file of measured calls .*; make it anew"):
        read("a", tmp_path)


def test_decode_attention_of_the_h200() -> None:
    calls = read("NVIDIA H200")["decode_attention"]
    table = EfficiencyTable.of(device("h200"), calls)
    for kind, dtype, shape, seconds in calls:
        assert table.predict(kind, dtype, shape).seconds == pytest.approx(seconds)
        # None is above the promised bandwidth, and none takes more than 40 us beyond 4 TB/s.
        nbytes = shape[0] * shape[2]
        assert nbytes / 4.8e12 < seconds < nbytes / 4e12 + 40e-6


def test_prompts_of_the_h200_are_predicted_by_the_others_within_a_twentieth() -> None:
    calls = [
        (KINDS[kind].cost(dtype, shape).flops, took) for kind, dtype, shape, took in read("NVIDIA H200")["attention"]
    ]
    for left_out in calls:
        fitted = FittedTimes.of(call for call in calls if call is not left_out)
        assert fitted is not None
        assert fitted.predict(left_out[0]).seconds == pytest.approx(left_out[1], rel=0.05)


def test_whatever_else_was_measured_of_the_h200_is_beyond_its_roofline() -> None:
    for operation, calls in read("NVIDIA H200").items():
        table = EfficiencyTable.of(device("h200"), calls)
        assert table.columns or operation == "all_reduce"  # over a link, not memory
        for column in (column for of_kind in table.columns.values() for column in of_kind.values()):
            assert all(0 < utilization < 1 for _, utilization in column.points)
