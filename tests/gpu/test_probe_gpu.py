"""Timing by replay, and a probe of a GPU: all parts run, in time, and nothing exceeds what the maker promises."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from strata.hardware.probe.run import probe
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.hardware.specs import recognize

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.mark.parametrize(("megabytes", "least"), [(4, 0.2), (64, 0.5), (256, 0.5)])
def test_a_copy_takes_no_less_than_the_bandwidth_allows(megabytes: int, least: float) -> None:
    """Operands that fit into the L2 cache as well: taking turns must leave nothing of them there."""
    device = recognize(torch.cuda.get_device_name())
    if device is None:
        pytest.skip("the device is not in the database")
    nbytes = megabytes * 2**20
    pairs = [torch.empty(2, nbytes, dtype=torch.uint8, device="cuda") for _ in range(copies_beyond_l2(2 * nbytes))]
    timing = time_replayed([partial(target.copy_, source) for source, target in pairs])
    promised = device.ceiling("bandwidth", measured=False).value
    assert least * promised < 2 * nbytes / min(timing.runs) <= promised


def test_a_call_that_is_recorded_often_takes_as_long_as_one() -> None:
    pair = torch.empty(2, 256 * 2**20, dtype=torch.uint8, device="cuda")
    copy = partial(pair[1].copy_, pair[0])
    once, often = (min(time_replayed([copy], repeats=50, estimate=estimate).runs) for estimate in (1.0, 1e-4))
    assert 1 / 2 < often / once < 2  # it is captured ten times


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
