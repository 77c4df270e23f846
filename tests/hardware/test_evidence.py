"""What was measured of a device: the package's calls, this machine's probe, others' tables, what another lends it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.cost import aiconfigurator
from strata.cost.aiconfigurator import data_folder, imported_efficiencies
from strata.cost.evidence import evidence_of
from strata.cost.extrapolated_device import ExtrapolatedDevice
from strata.hardware.figures import Cuda
from strata.hardware.measured import write
from strata.hardware.prediction import Call, Prediction
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
    # An engine starts with what comes with Strata then.
    assert evidence_of(device("h200"), environment, tmp_path, must_read=False).device is device("h200")


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


H100 = ExtrapolatedDevice(device("h200"), device("h100"))
# A memory of 4.8 TB/s and one of 3.35.
RATIO = 3.35 / 4.8


def test_what_was_borrowed_is_not_called_measured() -> None:
    shown = CliRunner().invoke(app, ["graph", "0.6B", "--hardware", "h100-nvl"], catch_exceptions=False).stdout
    assert "from calls and ceilings borrowed from NVIDIA H200, " in shown
    assert "3.48 TB/s (memory, read + written), borrowed: as on h200: " in shown
    told = CliRunner().invoke(app, ["graph", "0.6B", "--hardware", "h100-nvl", "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["predicted_from"]["measured"] == 0


def test_only_a_device_with_the_same_multiprocessors_borrows(tmp_path: Path) -> None:
    assert ExtrapolatedDevice.to(device("h100")) == H100
    assert ExtrapolatedDevice.to(device("h100-nvl")) is not None  # 132 as well
    for key in ("h200", "h100-pcie", "a100", "b200", "mi300x", "epyc-9654"):
        assert ExtrapolatedDevice.to(device(key)) is None, key
    other = replace(device("h100"), cuda=Cuda((10, 0), 227 * 1024, 132))
    assert ExtrapolatedDevice.to(other) is None
    assert ExtrapolatedDevice.to(device("h100"), tmp_path) is None  # nobody has calls
    write("NVIDIA H100 80GB HBM3", "a benchmark", {}, tmp_path)
    assert ExtrapolatedDevice.to(device("h100"), tmp_path) is None  # it has a file of its own
    lent = ExtrapolatedDevice.to(device("h200"), tmp_path)
    assert lent is not None
    assert lent.lender.key == "h100"


def test_beyond_the_start_of_a_kernel_calls_keep_their_utilization() -> None:
    kernel = 1.15e-6  # of the H200 in a graph
    rows, out, width = 1, 4096, 4096  # memory takes longest
    products: list[Call] = [
        ("product", "bfloat16", (rows, out, width), 10e-6),
        ("product", "bfloat16", (8192, out, width), 400e-6),  # products do
        ("product", "float4", (1, out, width), 10e-6),  # of which neither has a peak
        ("another", "bfloat16", (1,), 10e-6),
    ]
    # As quick as memory is, so that nothing is beyond it, and one that takes half a microsecond more.
    copies: list[Call] = [("traffic", "bfloat16", (48_000_000,), 10e-6), ("traffic", "bfloat16", (4_800_000,), 1.5e-6)]
    norms: list[Call] = [("traffic", "bfloat16", (1000,), 2e-6)]
    found = H100.calls({"linear": products, "rms_norm": norms, "copy": copies, "other": products[3:]})
    assert found == {
        "linear": [
            ("product", "bfloat16", (rows, out, width), pytest.approx(kernel + (10e-6 - kernel) / RATIO)),
            ("product", "bfloat16", (8192, out, width), pytest.approx(400e-6)),
        ],
        "rms_norm": [("traffic", "bfloat16", (1000,), pytest.approx(kernel + (2e-6 - kernel) / RATIO))],
        "copy": [
            ("traffic", "bfloat16", (48_000_000,), pytest.approx(10e-6 / RATIO)),
            ("traffic", "bfloat16", (4_800_000,), pytest.approx(0.5e-6 + 1e-6 / RATIO)),
        ],
    }


def test_sums_over_ranks_are_lent_between_links_that_are_as_fast() -> None:
    sums: list[Call] = [("nccl", "bfloat16", (2, 1024), 9e-6)]
    assert H100.calls({"all_reduce": sums}) == {"all_reduce": sums}
    nvl = ExtrapolatedDevice(device("h200"), device("h100-nvl"))  # 300 GB/s for 450
    assert nvl.calls({"all_reduce": sums}) == {}
    assert "nothing of messages" in str(nvl)
    assert "nothing of messages" not in str(H100)


def test_ceilings_are_lent_where_nothing_was_measured() -> None:
    promised = tuple(one for one in device("h100").figures if not one.measured)
    lent = ExtrapolatedDevice(device("h200"), replace(device("h100"), figures=promised)).device()
    assert lent.ceiling("bandwidth").value == pytest.approx(4.28e12 * RATIO)
    assert lent.ceiling("compute", "bfloat16").value == 800e12
    assert lent.ceiling("sustained", "bfloat16").value == 694e12
    assert lent.ceiling("step").value == device("h200").ceiling("step").value
    assert lent.ceiling("bandwidth").source.startswith("as on h200: ")
    assert {one.quantity for one in lent.figures if one.borrowed} == {
        *("bandwidth", "compute", "sustained", "launch", "kernel", "step")
    }
    assert lent.ceiling("memory").value == 80e9
    assert lent.ceiling("l2").value == 50 << 20  # that of the H200 is its own
    own = H100.device()  # of which all but its steps was measured
    assert {one.quantity for one in own.figures if one.borrowed} == {"step"}
    assert own.ceiling("bandwidth") == device("h100").ceiling("bandwidth")
    nvl = ExtrapolatedDevice(device("h200"), device("h100-nvl")).device()
    assert nvl.ceiling("compute", "bfloat16").value == pytest.approx(800e12 * 835.5 / 989.4)


B200 = "NVIDIA B200"


def row(m: int, latency: float, dtype: str = "bfloat16", product: str = B200) -> dict[str, Any]:
    common = {"framework": "VLLM", "version": "0.24.0", "op_name": "gemm", "kernel_source": "a kernel"}
    return common | {"device": product, "gemm_dtype": dtype, "m": m, "n": 4096, "k": 8192, "latency": latency}


def write_table(root: Path, place: str, rows: list[dict[str, Any]]) -> None:
    file = root / place / "gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), file)


def test_products_of_the_device_the_quickest_framework_counts(tmp_path: Path) -> None:
    write_table(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(16, 0.020), row(64, 0.022), row(16, 0.015, "fp8")])
    write_table(tmp_path, "b200_sxm/gemm/sglang/0.5.14", [row(16, 0.018), row(16, 0.001, "fp8_block")])
    write_table(tmp_path, "h200_sxm/gemm/vllm/0.24.0", [row(16, 0.016, product="NVIDIA H200")])
    table = imported_efficiencies(device("b200"), tmp_path)

    def predict(dtype: str, rows: int) -> Prediction:
        return table.predict("product", dtype, (rows, 4096, 8192))

    assert predict("bfloat16", 16) == Prediction(pytest.approx(18e-6), "measured")
    assert predict("bfloat16", 64) == Prediction(pytest.approx(22e-6), "measured")
    assert predict("float8", 16) == Prediction(pytest.approx(15e-6), "measured")
    assert predict("bfloat16", 32).origin == "interpolated"
    assert set(table.columns) == {("product", "bfloat16"), ("product", "float8")}


def test_calls_that_found_their_weight_in_the_cache_are_left_out(tmp_path: Path) -> None:
    # 64 MiB at 8 TB/s take 8.4 us.
    write_table(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(1, 0.004), row(16, 0.020)])
    (column,) = imported_efficiencies(device("b200"), tmp_path).columns["product", "bfloat16"].values()
    assert [size for size, _ in column.points] == [16]


def test_absent_and_foreign_tables_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(16, 0.020)])
    with pytest.raises(ValueError, match="has no products of NVIDIA L4"):
        imported_efficiencies(device("l4"), tmp_path)
    foreign = {key: value for key, value in row(16, 0.020).items() if key != "latency"}
    write_table(tmp_path, "b200_sxm/gemm/trtllm/9", [foreign])
    with pytest.raises(ValueError, match=r"gemm_perf.parquet: the column 'latency' is missing, which"):
        imported_efficiencies(device("b200"), tmp_path)
    monkeypatch.setattr(aiconfigurator, "_PACKAGE", "no_such_package")
    assert data_folder() is None
    with pytest.raises(ValueError, match=r"the tables of b200 are in aiconfigurator-core, which is not installed: pip"):
        imported_efficiencies(device("b200"))


def test_the_folder_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package_of_tables").mkdir()
    (tmp_path / "a_package_of_tables" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(aiconfigurator, "_PACKAGE", "a_package_of_tables")
    assert data_folder() == tmp_path / "a_package_of_tables" / "systems" / "data"
