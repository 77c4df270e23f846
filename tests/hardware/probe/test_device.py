"""A probed machine as a device: the best that was measured, beside what is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.cost.efficiency import EfficiencyTable
from strata.hardware.machine import Processor
from strata.hardware.prediction import Prediction
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.device import device_of, probed_calls
from strata.hardware.probe.report import ProbeReport
from strata.hardware.specs import device

REPORT = ProbeReport(
    "NVIDIA H200",
    "2026-11-23",
    20.0,
    Processor("Intel", 16, 1 << 37, {}, 2),
    (),
    (
        Ceiling("copy", 4.1e12, 1e-3, shape=(1 << 28,)),
        Ceiling("copy", 4.2e12, 1e-3, shape=(1 << 30,)),
        Ceiling("product", 7e14, 2 * 8192**3 / 7e14, "bfloat16", (8192, 8192, 8192)),
        Ceiling("product", 1e14, 2 * 64 * 4096**2 / 1e14, "bfloat16", (64, 4096, 4096)),
        Ceiling("host to device", 52e9, 1e-3),
        Ceiling("device to host", 54e9, 1e-3),
    ),
    versions={"torch": "2.11.0"},
)


def test_the_best_is_measured_and_what_is_promised_stays() -> None:
    found = device_of(REPORT)
    assert found.ceiling("compute", "bfloat16").value == 7e14
    assert found.ceiling("bandwidth").value == 4.2e12
    assert found.ceiling("host").value == 54e9
    assert found.ceiling("compute", "bfloat16", measured=False).value == pytest.approx(989.4e12)
    assert found.ceiling("compute", "float8") == device("h200").ceiling("compute", "float8")  # as the database has it
    assert found.cuda == device("h200").cuda


def test_a_device_that_is_not_in_the_database_is_what_was_measured() -> None:
    found = device_of(replace(REPORT, product="AMD EPYC"))
    assert (found.key, found.product, found.cuda) == ("amd-epyc", "AMD EPYC", None)
    assert found.known("bandwidth", measured=False) is None
    assert found.ceiling("bandwidth").value == 4.2e12


def test_utilization_is_of_what_is_promised() -> None:
    known = _efficiencies(REPORT)
    exact = known.predict("product", "bfloat16", (8192, 8192, 8192))
    assert exact == Prediction(pytest.approx(2 * 8192**3 / 7e14), "measured")
    larger = known.predict("product", "bfloat16", (16384, 8192, 8192))
    assert larger == Prediction(pytest.approx(4 * 8192**3 / 7e14), "analytic")


def test_of_a_cpu_all_threads_count() -> None:
    products = [Ceiling("product", 1e11, 1e-3, "float32", (512, 512, 512), count) for count in (16, 1)]
    copies = [Ceiling("copy", 1e11, 1e-3, shape=(1 << 28,), count=16)]
    slow = replace(products[1], seconds=1e-2)
    found = _efficiencies(replace(REPORT, product="a CPU", ceilings=(*copies, products[0], slow)))
    assert found.predict("product", "float32", (512, 512, 512)) == Prediction(pytest.approx(1e-3), "measured")


def _efficiencies(report: ProbeReport) -> EfficiencyTable:
    calls = probed_calls(report).values()
    return EfficiencyTable.of(device_of(report), (call for of_one in calls for call in of_one))
