"""This machine's processor by a probe that was kept, whole or not, and by a second of measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cost.evidence import evidence_of
from strata.hardware.machine import cpu_name, processor
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.cpu import CpuSizes
from strata.hardware.probe.report import ProbeReport, file_of, keep
from strata.plan.explain import ceilings
from strata.plan.explain.ceilings import processor_device

COPY = Ceiling("copy", 1.5e10, 0.1, shape=(10**9,))
PRODUCTS = tuple(Ceiling("product", 1.5e11, 0.01, dtype, (512,) * 3) for dtype in ("float32", "bfloat16"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "_QUICK", CpuSizes(copied=1 << 20, squares=(32,), rows=(1,), width=64, call=0.001))


def keep_probe(*found: Ceiling) -> None:
    keep(ProbeReport(cpu_name(), "2026-11-23", 1.0, processor(), (), found), file_of(cpu_name(), 1))


def test_a_whole_probe_is_taken_as_it_is() -> None:
    keep_probe(COPY, *PRODUCTS)
    device, sources = processor_device()
    assert sources == ()
    assert evidence_of(device).device.ceiling("compute", "bfloat16").value == 1.5e11


@pytest.mark.parametrize(
    ("found", "lacking"),
    [((COPY,), "float32, bfloat16"), ((COPY, PRODUCTS[0]), "bfloat16"), (PRODUCTS, "copies")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_probe_lacks_is_measured_now_and_the_rest_is_the_probes(
    found: tuple[Ceiling, ...], lacking: str
) -> None:
    keep_probe(*found)
    device, (source,) = processor_device()
    assert source.startswith(f"ceilings ({lacking}) of {cpu_name()} measured now in ")
    known = evidence_of(device).device
    for ceiling, quantity in ((COPY, "bandwidth"), *((one, "compute") for one in PRODUCTS)):
        assert (known.ceiling(quantity, ceiling.dtype).value == ceiling.value) == (ceiling in found)


def test_without_a_probe_all_is_measured_now() -> None:
    device, (source,) = processor_device()
    assert source.startswith(f"ceilings of {cpu_name()} measured now in ")
    assert evidence_of(device).device.ceiling("compute", "bfloat16").value > 0
