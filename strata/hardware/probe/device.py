"""A probed machine as a device to plan with: what it reached, beside what its maker promises if it is a known one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from strata.hardware.figures import Device, Figure, reached
from strata.hardware.prediction import Call
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.report import ProbeReport
from strata.hardware.specs import recognize

# Of which quantity of a device a ceiling is a figure.
_FIGURES = {
    "copy": "bandwidth",
    "product": "compute",
    "product, sustained": "sustained",
    "host to device": "host",
    "device to host": "host",
    "launch": "launch",
    "kernel in a graph": "kernel",
}
# Of which operation a ceiling is a call.
_OPERATIONS = {"product": "linear", "attention": "attention"}


def device_of(report: ProbeReport) -> Device:
    """The device of the report with the best that was measured of each kind, in place of what the database has
    measured; one that is not in the database is known by its measurements alone.
    """
    known = recognize(report.product)
    measured = tuple(_figures(report))
    if known is None:
        key = re.sub(r"[^a-z0-9]+", "-", report.product.lower()).strip("-")
        return Device(key, report.product, measured)
    names = {(one.quantity, one.dtype) for one in measured}
    kept = tuple(one for one in known.figures if not one.measured or (one.quantity, one.dtype) not in names)
    return Device(known.key, known.product, kept + measured, known.cuda, known.price_per_hour)


def probed_calls(report: ProbeReport) -> dict[str, list[Call]]:
    """The report's products and prompts by the operation that is measured by them, by all threads of a CPU."""
    most = max((one.count for one in _of_one_device(report)), default=1)
    found: dict[str, list[Call]] = {}
    for one in _of_one_device(report):
        if one.dtype is not None and one.count == most:
            call = one.quantity, one.dtype, one.shape, one.seconds
            found.setdefault(_OPERATIONS[one.quantity], []).append(call)
    return found


def _figures(report: ProbeReport) -> Iterator[Figure]:
    best: dict[tuple[str, str | None], float] = {}
    for one in report.ceilings:
        if one.quantity in _FIGURES:
            key = _FIGURES[one.quantity], one.dtype
            better = min if one.unit == "s" else max
            best[key] = better(one.value, best.get(key, one.value))
    source = f"strata probe, torch {report.versions.get('torch')}"
    for (quantity, dtype), value in best.items():
        yield from reached(source, report.date, **{quantity: value if dtype is None else {dtype: value}})


def _of_one_device(report: ProbeReport) -> list[Ceiling]:
    return [one for one in report.ceilings if one.quantity in _OPERATIONS]
