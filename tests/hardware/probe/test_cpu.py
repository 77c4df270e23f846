"""A probe of a CPU, with sizes so small that it takes a second; rates by hand count."""

from __future__ import annotations

import time

import pytest
import torch

from strata.hardware.probe import sustained
from strata.hardware.probe.ceiling import Ceiling, Measured
from strata.hardware.probe.cpu import CpuSizes, probe_items
from strata.hardware.probe.sustained import HeldProduct, hold
from strata.hardware.telemetry import Summary

SMALL = CpuSizes(copied=1 << 20, squares=(32, 64), rows=(1, 8), width=64, attended=64, call=0.01, held=0.05)


@pytest.fixture(scope="module")
def measured() -> Measured:
    found = Measured()
    found.run(probe_items({}, SMALL), time.perf_counter() + 60)
    return found


def work(one: Ceiling) -> float:
    """Bytes or FLOPs of a call."""
    if one.quantity in ("copy", "read"):
        return one.shape[0] * (2 if one.quantity == "copy" else 1)
    if one.quantity == "attention":
        sequences, heads, tokens, size = one.shape
        return sum(4 * size * (position + 1) for position in range(tokens)) * sequences * heads
    rows, out, width = one.shape
    return 2 * rows * out * width


def test_all_is_measured_and_rates_are_work_over_time(measured: Measured) -> None:
    assert measured.missing == {}
    for one in measured.ceilings:
        assert one.value == pytest.approx(work(one) / one.seconds)
    found = {(one.quantity, one.dtype, one.shape) for one in measured.ceilings}
    for dtype in ("float32", "bfloat16"):
        assert {(64, 64, 64), (32, 32, 32), (1, 64, 64), (8, 64, 64)} == {
            shape for quantity, of, shape in found if (quantity, of) == ("product", dtype)
        }
    assert ("product, sustained", "float32", (64, 64, 64)) in found


def test_threads_are_said_and_put_back(measured: Measured) -> None:
    threads = torch.get_num_threads()
    assert {one.count for one in measured.ceilings if one.quantity == "copy"} == {threads, 1}
    assert {one.count for one in measured.ceilings if one.quantity == "attention"} == {threads}


def test_a_product_that_slows_down_is_slower_when_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.001 if now < 1 else 0.002  # a limit that acts after a second

    monkeypatch.setattr(sustained.time, "perf_counter", lambda: now)
    monkeypatch.setattr(sustained.time, "sleep", lambda seconds: None)
    summaries: dict[str, Summary] = {}
    burst, held = hold(HeldProduct(call, lambda: None, 4, "float32", 100), 5, None, summaries)
    assert (burst.quantity, burst.value) == ("product, burst", pytest.approx(2e6 / 0.001))
    assert (held.quantity, held.value) == ("product, sustained", pytest.approx(2e6 / 0.002))
    assert summaries == dict.fromkeys(("product, burst", "product, sustained"), Summary(None, None, None, ()))
