"""Products that others measured, from files in the format of aiconfigurator-core 0.12.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from strata.cost import aiconfigurator
from strata.cost.aiconfigurator import data_folder, imported_efficiencies
from strata.hardware.prediction import Prediction
from strata.hardware.specs import device

B200 = "NVIDIA B200"


def row(m: int, latency: float, dtype: str = "bfloat16", product: str = B200) -> dict[str, Any]:
    common = {"framework": "VLLM", "version": "0.24.0", "op_name": "gemm", "kernel_source": "a kernel"}
    return common | {"device": product, "gemm_dtype": dtype, "m": m, "n": 4096, "k": 8192, "latency": latency}


def write(root: Path, place: str, rows: list[dict[str, Any]]) -> None:
    file = root / place / "gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), file)


def test_products_of_the_device_the_quickest_framework_counts(tmp_path: Path) -> None:
    write(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(16, 0.020), row(64, 0.022), row(16, 0.015, "fp8")])
    write(tmp_path, "b200_sxm/gemm/sglang/0.5.14", [row(16, 0.018), row(16, 0.001, "fp8_block")])
    write(tmp_path, "h200_sxm/gemm/vllm/0.24.0", [row(16, 0.016, product="NVIDIA H200")])
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
    write(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(1, 0.004), row(16, 0.020)])
    (column,) = imported_efficiencies(device("b200"), tmp_path).columns["product", "bfloat16"].values()
    assert [size for size, _ in column.points] == [16]


def test_absent_and_foreign_tables_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "b200_sxm/gemm/vllm/0.24.0", [row(16, 0.020)])
    with pytest.raises(ValueError, match="has no products of NVIDIA L4"):
        imported_efficiencies(device("l4"), tmp_path)
    foreign = {key: value for key, value in row(16, 0.020).items() if key != "latency"}
    write(tmp_path, "b200_sxm/gemm/trtllm/9", [foreign])
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
