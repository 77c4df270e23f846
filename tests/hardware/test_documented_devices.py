"""The table of devices in docs/hardware.md is what the database says."""

from __future__ import annotations

from pathlib import Path

from strata.hardware.figures import MIB, Device
from strata.hardware.specs import DEVICES

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
