"""The table of devices in docs/hardware.md is what the database says."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.hardware import measured
from strata.hardware.figures import MIB, Device
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import kept
from strata.hardware.specs import DEVICES, device
from strata.kernels import tuned

DOCUMENT = Path(__file__).parents[2] / "docs" / "hardware.md"


def said(device: Device, quantity: str, unit: float, dtype: str | None = None) -> str:
    """A figure with at most four digits, a dash where none is known."""
    figure = device.known(quantity, dtype, measured=False) or device.known(quantity, dtype)
    return "-" if figure is None else f"{float(f'{figure.value / unit:.4g}'):g}"


def row(device: Device) -> str:
    rates = " / ".join(said(device, "compute", 1e12, dtype) for dtype in ("bfloat16", "float8", "int8", "float4"))
    others = [
        said(device, quantity, unit)
        for quantity, unit in (
            ("memory", 1e9), ("bandwidth", 1e12), ("l2", MIB), ("l3", MIB), ("link", 1e9), ("host", 1e9), ("power", 1),
        )
    ]  # fmt: skip
    return f"| {' | '.join([f'`{device.key}`', rates, *others])} |"


def test_the_documented_table_is_the_database() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| device |")) + 2
    assert lines[first : lines.index("", first)] == [row(device) for device in DEVICES.values()]


# Of each device that was measured: what the document calls it, in which unit, to so many digits.
REACHED = {
    "bf16, T/s": ("compute", "bfloat16", 1e12),
    "fp8, T/s": ("compute", "float8", 1e12),
    "int8, T/s": ("compute", "int8", 1e12),
    "bf16 held for seconds, T/s": ("sustained", "bfloat16", 1e12),
    "memory, read plus written, TB/s": ("bandwidth", None, 1e12),
    "host, GB/s": ("host", None, 1e9),
    "launch by the host, us": ("launch", None, 1e-6),
    "kernel in a CUDA graph, us": ("kernel", None, 1e-6),
    "around a step, us": ("step", None, 1e-6),
}
TABLES = {
    "tuned products": tuned.FOLDER,
    "thresholds": tuned.FOLDER.with_name("thresholds"),
    "measured calls": measured.FOLDER,
}


def reached(key: str, quantity: str, dtype: str | None, unit: float) -> str:
    figure = device(key).known(quantity, dtype)
    return "-" if figure is None or not figure.measured else f"{figure.value / unit:.4g}"


def test_what_was_reached_has_one_form_for_all_devices() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| reached |")) + 2
    keys = ("h200", "h100")
    rows = [[name, *(reached(key, *of) for key in keys)] for name, of in REACHED.items()] + [
        [name, *("yes" if measured.path_of(device(key).product, folder).is_file() else "-" for key in keys)]
        for name, folder in TABLES.items()
    ]
    assert lines[first : lines.index("", first)] == [f"| {' | '.join(row)} |" for row in rows]


def test_the_h100_reached_what_its_probe_found() -> None:
    """The report of `strata probe` that is committed, to four digits; copies as one of many sizes."""
    report = kept(DOCUMENT.parents[1] / "benchmarks" / "results" / "h100_probe.json")
    probed, own = device_of(report), device("h100")
    for figure in probed.figures:
        known = own.known(figure.quantity, figure.dtype)
        if figure.measured and known is not None and known.measured:
            assert float(f"{known.value:.4g}") == pytest.approx(float(f"{figure.value:.4g}"), rel=2e-4), figure
    shared = {(one.quantity, one.dtype) for one in own.figures if one.measured}
    assert shared <= {(one.quantity, one.dtype) for one in probed.figures}
