"""A probe of a GPU: all parts run, in time, and nothing exceeds what the maker promises."""

from __future__ import annotations

import pytest

from strata.hardware.probe.run import probe
from strata.hardware.specs import recognize

pytestmark = pytest.mark.gpu


def test_all_is_measured_below_what_is_promised() -> None:
    report = probe("cuda", 50)
    assert set(report.missing) <= {"telemetry"}
    assert report.seconds < 50
    best: dict[tuple[str, str | None], float] = {}
    for one in report.ceilings:
        key = (one.quantity, one.dtype)
        best[key] = max(best.get(key, 0.0), one.value)
    assert best["product, burst", "bfloat16"] > 0.9 * best["product, sustained", "bfloat16"]
    assert best["read", None] > 0.5 * best["copy", None]
    known = recognize(report.product)
    if known is None:
        pytest.skip(f"{report.product} is not in the database")
    for (quantity, dtype), value in best.items():
        if quantity == "product":
            assert 0.3 < value / known.ceiling("compute", dtype, measured=False).value < 1, dtype
    assert 0.6 < best["copy", None] / known.ceiling("bandwidth", measured=False).value < 1
    for quantity in ("host to device", "device to host"):
        assert best[quantity, None] < known.ceiling("host", measured=False).value
    for quantity in ("launch", "graph launch", "kernel in a graph"):
        assert 1e-7 < best[quantity, None] < 1e-4
