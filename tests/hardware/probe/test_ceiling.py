"""Parts of a probe: those that fail or do not fit are named, and what was measured stays."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from strata.hardware.probe.ceiling import UNITS, Ceiling, Measured, ProbeItem


def some(count: int, fault: str = "") -> Iterator[Ceiling]:
    for number in range(count):
        yield Ceiling("copy", number, 1.0)
    if fault:
        raise RuntimeError(f"{fault}\nand more")


def test_a_part_that_fails_keeps_what_it_has_and_the_others_run() -> None:
    measured = Measured()
    parts = [ProbeItem("first", lambda: some(2, "no memory")), ProbeItem("second", lambda: some(1))]
    measured.run(parts, time.perf_counter() + 100)
    assert [one.value for one in measured.ceilings] == [0, 1, 0]
    assert measured.missing == {"first": "RuntimeError: no memory"}


def test_what_does_not_fit_into_the_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    measured = Measured()
    measured.run([ProbeItem("first", lambda: some(5)), ProbeItem("second", lambda: some(1))], end=3)
    assert len(measured.ceilings) == 3
    assert measured.missing == {
        "first": "the time was over before all of it was measured",
        "second": "the time was over",
    }


def test_every_quantity_has_a_unit() -> None:
    assert {Ceiling(quantity, 1, 1).unit for quantity in UNITS} == {"B/s", "FLOP/s", "s"}
