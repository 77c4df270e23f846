"""All that was measured of a device and can be told here: in the package, by this machine's probe, by others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from strata.cost.aiconfigurator import data_folder, imported_efficiencies
from strata.cost.efficiency import EfficiencyTable
from strata.cost.extrapolated_device import ExtrapolatedDevice
from strata.hardware import measured
from strata.hardware.figures import Device
from strata.hardware.prediction import Call
from strata.hardware.probe.device import device_of, probed_calls
from strata.hardware.probe.report import ProbeReport, kept, newest
from strata.hardware.specs import device as listed_device
from strata.kernels import tuned

# Whose kernels are looked at for a device that runs none of Strata's own, and whose launches and messages stand in
# where a device's were not measured.
STAND_IN = "h200"
# What kernels reach of the peaks that a device's maker states, as measured on an H200: 700 of 989 TFLOP/s, 3.6 of 4.8
# TB/s.
PRODUCTS, MEMORY = 0.71, 0.75
PRODUCT = "linear"  # the operation whose calls are products alone


@dataclass(frozen=True)
class Evidence:
    """device: with the ceilings that this machine's probe found. calls: by operation, those of tuned kernels among
    them. products: that others measured, where nothing was measured here. sources: where all of it comes from, in
    words. loan: the other device whose calls and ceilings stand in.
    """

    device: Device
    calls: Mapping[str, list[Call]]
    products: EfficiencyTable | None = None
    sources: tuple[str, ...] = ()
    loan: ExtrapolatedDevice | None = None


def evidence_of(
    device: Device,
    environment: Mapping[str, str] = os.environ,
    imported: Path | None = None,
    *,
    must_read: bool = True,
) -> Evidence:
    """Of a device of the database, or of a processor with the ceilings that are known of it, which stay where the probe
    found none. imported: the folder of aiconfigurator-core's tables, the installed package's by
    default. must_read: raise ValueError, naming it, for a probe's file that cannot be read; else it is not there.
    """
    calls, sources = measured.read(device.product), []
    if calls:
        sources.append("calls measured on another machine with this device, which come with Strata")
    tuned_calls = calls_of(tuned.read(device.product))
    if (loan := ExtrapolatedDevice.to(device)) is not None:
        calls = loan.calls(measured.read(loan.lender.product))
        tuned_calls = loan.calls(calls_of(tuned.read(loan.lender.product)))
        sources.append(str(loan))
    path = newest(device.product, environment)
    if (report := None if path is None else _probe(path, must_read)) is not None:
        probed = device_of(report)
        found_there = {(one.quantity, one.dtype, one.measured) for one in probed.figures}
        others = tuple(one for one in device.figures if (one.quantity, one.dtype, one.measured) not in found_there)
        device = replace(probed, figures=probed.figures + others)
        _add(calls, probed_calls(report))
        sources.append(f"this machine's probe of {report.date}, {path}")
    if loan is not None:
        device = replace(loan, borrower=device).device()
    _add(calls, tuned_calls)
    products = None if PRODUCT in calls else _imported(device, imported or data_folder())
    if products is not None:
        sources.append("products of aiconfigurator-core, which NVIDIA measured")
    return Evidence(device, calls, products, tuple(sources), loan)


def calls_of(table: tuned.Table) -> dict[str, list[Call]]:
    """The products of a table of tuned kernels, by operation."""
    found: dict[str, list[Call]] = {}
    for key, choice in table.items():
        call = "product", key.dtype, (key.rows, key.out, key.width), choice.seconds
        found.setdefault(key.operation, []).append(call)
    return found


def _add(calls: dict[str, list[Call]], more: Mapping[str, list[Call]]) -> None:
    for operation, found in more.items():
        calls.setdefault(operation, []).extend(found)


def _probe(path: Path, must_read: bool) -> ProbeReport | None:
    try:
        return kept(path)
    except ValueError:
        if must_read:
            raise
        return None


def _imported(device: Device, folder: Path | None) -> EfficiencyTable | None:
    """None where the package, or what reads its files, is not installed, and of a device that it does not have."""
    if folder is None:
        return None
    try:
        return imported_efficiencies(device, folder)
    except ValueError:
        return None


def attainable(known: Device) -> Device:
    """With what kernels reach on an H200 as ceilings, and its times for what small kernels and steps take beside."""
    shares = {"compute": PRODUCTS, "bandwidth": MEMORY}
    best = [
        replace(figure, value=figure.value * shares[figure.quantity], measured=True, source="stated efficiency")
        for figure in known.figures
        if figure.quantity in shares and not figure.sparse and not figure.measured
    ]
    stand_in = listed_device(STAND_IN)
    overheads = [figure for name in ("kernel", "step") if (figure := stand_in.known(name)) is not None]
    missing = [figure for figure in overheads if known.known(figure.quantity) is None]
    measured = {(figure.quantity, figure.dtype) for figure in known.figures if figure.measured}
    best = [figure for figure in best if (figure.quantity, figure.dtype) not in measured]
    return replace(known, figures=(*known.figures, *best, *missing))
