"""Thresholds between kernels: one row each in the table of a device, which other devices take where they have none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from strata.hardware.specs import device
from strata.kernels import choose
from strata.kernels.choose import MEASURED, thresholds, thresholds_of
from strata.kernels.device_limits import DeviceLimits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the package's tables."""
    monkeypatch.setattr(choose, "_FOLDER", tmp_path)
    monkeypatch.setattr(choose, "thresholds_of", thresholds_of.__wrapped__)
    return tmp_path


def write(folder: Path, product: str, rows: list[dict[str, object]]) -> None:
    (folder / f"{product}.json").write_text(json.dumps({"device": product, "thresholds": rows}))


def test_a_device_without_a_table_has_those_that_were_measured() -> None:
    for name in ("h100", "h200"):
        assert thresholds(DeviceLimits.listed(device(name))) == thresholds_of(MEASURED)


def test_a_table_has_every_row_with_its_measurement(folder: Path) -> None:
    values = {name: place + 5 for place, name in enumerate(asdict(thresholds_of(MEASURED)))}
    rows: list[dict[str, object]] = [{"name": name, "value": value, "measured": "x"} for name, value in values.items()]
    write(folder, "own", rows)
    assert asdict(choose.thresholds_of("own")) == values
    for wrong in (rows[1:], [*rows, rows[0]], [rows[0] | {"measured": ""}, *rows[1:]], [{"name": "other"}]):
        write(folder, "own", wrong)
        with pytest.raises(ValueError, match=r"own\.json"):
            choose.thresholds_of("own")
