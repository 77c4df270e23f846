"""Times of products that others measured, for devices that are not here: the tables in the package aiconfigurator-core.

It is optional (`pip install 'strata-llm[devices]'`), Apache-2.0, by NVIDIA. Its data are parquet files, one for a
device, a framework and its version, `systems/data/DEVICE/gemm/FRAMEWORK/VERSION/gemm_perf.parquet`, with a row for each
call: the device by the name of its driver, `gemm_dtype`, `m` rows, `n` results and `k` numbers of each row, `latency`
in milliseconds. Nothing of the package is run. Format as of 0.12.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from strata.cost.efficiency import EfficiencyTable
from strata.hardware.figures import Device
from strata.hardware.prediction import Call

_PACKAGE = "aiconfigurator_core"
_INSTALL = "pip install 'strata-llm[devices]'"
# Its names of dtypes; others scale blocks, or keep activations in another dtype than weights.
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "fp8": "float8"}
_COLUMNS = ("device", "gemm_dtype", "m", "n", "k", "latency")


def data_folder() -> Path | None:
    """Where the package keeps its tables; None if it is not installed. It is not imported."""
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "systems" / "data"


def imported_efficiencies(device: Device, folder: Path | None = None) -> EfficiencyTable:
    """Utilization of a device by its products in the package's tables, of all frameworks the quickest.

    Calls that were quicker than the roofline allows found their weight in the cache, and are left out. folder: of the
    tables, the installed package's by default. Raises ValueError if there are none, or none of this device, or if one
    has another format.
    """
    root = data_folder() if folder is None else folder
    if root is None:
        raise ValueError(f"the tables of {device.key} are in aiconfigurator-core, which is not installed: {_INSTALL}")
    measured = [one for file in sorted(root.glob("*/gemm/*/*/gemm_perf.parquet")) for one in _products(file, device)]
    if not measured:
        raise ValueError(f"{root} has no products of {device.product}")
    return EfficiencyTable.of(device, measured, most=1.0)


def _products(file: Path, device: Device) -> Iterator[Call]:
    try:
        import pyarrow.compute as compute
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"reading {file.name} takes pyarrow, which is not installed: {_INSTALL}") from None
    schema = parquet.read_schema(file)
    if missing := [name for name in _COLUMNS if name not in schema.names]:
        raise ValueError(f"{file}: the column {missing[0]!r} is missing, which aiconfigurator-core 0.12.0 has")
    first = parquet.ParquetFile(file).read_row_group(0, columns=["device"]).slice(0, 1).to_pylist()
    if not first or first[0]["device"] != device.product:  # a file has one device
        return
    rows = parquet.read_table(file, columns=list(_COLUMNS))
    rows = rows.filter(compute.equal(rows["device"], device.product))
    columns = (rows[name].to_pylist() for name in _COLUMNS[1:])
    for dtype, m, n, k, milliseconds in zip(*columns, strict=True):
        if dtype in _DTYPES and milliseconds > 0:
            yield "product", _DTYPES[dtype], (m, n, k), milliseconds / 1e3
