"""What was measured of a device, from the package, this machine's probe and others' tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from strata.cost.evidence import evidence_of
from strata.hardware.prediction import Prediction
from strata.hardware.probe.report import file_of, keep
from strata.hardware.specs import device
from tests.hardware.probe.test_device import REPORT


def test_without_a_probe_it_is_what_comes_with_strata(tmp_path: Path) -> None:
    found = evidence_of(device("h200"), {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)
    assert found.device is device("h200")
    assert "decode_attention" in found.calls
    assert found.products is None
    assert len(found.sources) == 1
    nothing = evidence_of(device("a100"), {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)
    assert (nothing.calls, nothing.products, nothing.sources) == ({}, None, ())


def test_the_machines_probe_of_that_device_counts(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    path = file_of("NVIDIA H200", 2, environment)
    keep(REPORT, path)
    found = evidence_of(device("h200"), environment, tmp_path)
    assert found.device.key == "h200"
    assert found.device.ceiling("bandwidth").value == 4.2e12
    probed = 2 * 8192**3 / 7e14
    assert ("product", "bfloat16", (8192, 8192, 8192), probed) in found.calls["linear"]
    assert found.sources[1] == f"this machine's probe of 2026-11-23, {path}"
    assert evidence_of(device("a100"), environment, tmp_path).device is device("a100")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"nvidia-h200-x2\.json: "):
        evidence_of(device("h200"), environment, tmp_path)


def test_a_device_without_calls_borrows_those_of_another_and_keeps_what_its_probe_found(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    lender, found = (evidence_of(device(key), environment, tmp_path) for key in ("h200", "h100"))
    assert found.calls.keys() == lender.calls.keys()
    assert found.calls["all_reduce"] == lender.calls["all_reduce"]
    assert all(
        later[:3] == before[:3] and later[3] > before[3]
        for before, later in zip(lender.calls["decode_attention"], found.calls["decode_attention"], strict=True)
    )
    (source,) = found.sources
    assert source.startswith("calls and ceilings borrowed from NVIDIA H200, ")
    assert found.loan is not None
    assert lender.loan is None
    assert found.device.ceiling("bandwidth") == device("h100").ceiling("bandwidth")  # measured, too
    path = file_of("NVIDIA H100 80GB HBM3", 1, environment)
    keep(replace(REPORT, product="NVIDIA H100 80GB HBM3"), path)
    probed = evidence_of(device("h100"), environment, tmp_path)
    assert probed.device.ceiling("bandwidth").value == 4.2e12
    assert probed.device.ceiling("step") == found.device.ceiling("step")
    assert ("product", "bfloat16", (8192, 8192, 8192), 2 * 8192**3 / 7e14) in probed.calls["linear"]
    assert probed.sources == (source, f"this machine's probe of 2026-11-23, {path}")


def test_tables_of_others_stand_in_where_nothing_was_measured(tmp_path: Path) -> None:
    row = {"device": "NVIDIA B200", "gemm_dtype": "bfloat16", "m": 16, "n": 4096, "k": 8192, "latency": 0.02}
    file = tmp_path / "b200_sxm" / "gemm" / "vllm" / "1" / "gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist([row]), file)
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    found = evidence_of(device("b200"), environment, tmp_path)
    assert found.products is not None
    assert found.products.predict("product", "bfloat16", (16, 4096, 8192)) == Prediction(
        pytest.approx(2e-5), "measured"
    )
    assert found.sources == ("products of aiconfigurator-core, which NVIDIA measured",)
    assert evidence_of(device("a100"), environment, tmp_path).products is None
    assert evidence_of(device("h200"), environment, tmp_path).products is None
