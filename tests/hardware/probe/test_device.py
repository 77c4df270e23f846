"""A probe: parts that fail or do not fit are named, products, a CPU; kept as JSON, and a device of what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.cost.efficiency import EfficiencyTable
from strata.hardware.machine import Processor
from strata.hardware.prediction import Prediction
from strata.hardware.probe import sustained
from strata.hardware.probe.ceiling import UNITS, Ceiling, Measured, ProbeItem
from strata.hardware.probe.cpu import CpuSizes, probe_items
from strata.hardware.probe.device import device_of, probed_calls
from strata.hardware.probe.products import operands, precision, product
from strata.hardware.probe.report import Gpu, ProbeReport, file_of, keep, kept
from strata.hardware.probe.sustained import hold
from strata.hardware.specs import device
from strata.hardware.telemetry import Summary

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


def _efficiencies(report: ProbeReport) -> EfficiencyTable:
    calls = probed_calls(report).values()
    return EfficiencyTable.of(device_of(report), (call for of_one in calls for call in of_one))


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


KEPT = ProbeReport(
    "NVIDIA H200",
    "2026-11-23",
    21.5,
    Processor("Intel", 16, 1 << 37, {"1d": 49152}, 2),
    (Gpu("NVIDIA H200", "GPU-1", 150 << 30, 60 << 20, 132, 700.0, 1.98e9, (5, 16), 18, (None, "processors"), (1,), 0),),
    (
        Ceiling("product", 8e14, 1.4e-3, "bfloat16", (8192, 8192, 8192)),
        Ceiling("all_reduce", 3.5e-6, 3.5e-6, "bfloat16", (65536,), 2, "one shot"),
    ),
    {"product, sustained": Summary(699.0, 1.7e9, 61, ("power limit",))},
    {"attention": "the time was over"},
    {"torch": "2.11.0", "driver": None},
)


def test_a_report_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    keep(KEPT, path)
    assert kept(path) == KEPT
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]
    assert [one["unit"] for one in json.loads(path.read_text())["ceilings"]] == ["FLOP/s", "s"]


def test_the_name_of_the_file(tmp_path: Path) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path)}
    assert file_of("NVIDIA H100 80GB HBM3", 1, caches) == tmp_path / "strata" / "probe" / "nvidia-h100-80gb-hbm3.json"
    assert file_of("AMD EPYC", 0, caches).name == "amd-epyc.json"
    assert file_of("NVIDIA H200", 8, caches).name == "nvidia-h200-x8.json"
    assert file_of("../..", 0, {}) == Path.home() / ".cache" / "strata" / "probe" / "unknown.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "it is no JSON object of format 1"),
        ("{", "Input data was truncated"),
        ('{"format": 2}', "it is no JSON object of format 1"),
        ('{"format": 1}', "missing required field `product`"),
    ],
)
def test_what_no_probe_wrote_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"report.json: .*{message}.*; run `strata probe` again"):
        kept(path)


def test_unknown_quantities_and_absent_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(KEPT.to_dict()).replace("all_reduce", "gossip"))
    with pytest.raises(ValueError, match="'gossip' is unknown"):
        kept(path)
    with pytest.raises(ValueError, match=r"absent.json: No such file or directory; `strata probe` writes it"):
        kept(tmp_path / "absent.json")


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


CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 0)])
def test_products_by_dtype(dtype: str, close: float) -> None:
    torch.manual_seed(0)
    x, weight = operands(dtype, 24, 40, 64, CPU)
    assert (x.shape, weight.shape) == ((24, 64), (40, 64))
    found, right = product(dtype, CPU)(x, weight).double(), x.double() @ weight.double().t()
    assert (found - right).abs().max() <= close * right.abs().max()


def test_operands_are_random_so_that_they_take_the_power_of_real_ones() -> None:
    x, _ = operands("bfloat16", 64, 1, 64, CPU)
    assert 0.8 < x.float().std() < 1.2


def test_the_precision_of_float32_products_is_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with precision("tf32"):
        assert matmul.fp32_precision == "tf32"
    with precision("float32"):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == before


SMALL = CpuSizes(copied=1 << 20, squares=(32, 64), rows=(1, 8), width=64, attended=64, call=0.01, held=0.05)


@pytest.fixture(scope="module")
def measured_cpu() -> Measured:
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


def test_all_is_measured_and_rates_are_work_over_time(measured_cpu: Measured) -> None:
    assert measured_cpu.missing == {}
    for one in measured_cpu.ceilings:
        assert one.value == pytest.approx(work(one) / one.seconds)
    found = {(one.quantity, one.dtype, one.shape) for one in measured_cpu.ceilings}
    for dtype in ("float32", "bfloat16"):
        assert {(64, 64, 64), (32, 32, 32), (1, 64, 64), (8, 64, 64)} == {
            shape for quantity, of, shape in found if (quantity, of) == ("product", dtype)
        }
    assert ("product, sustained", "float32", (64, 64, 64)) in found


def test_threads_are_said_and_put_back(measured_cpu: Measured) -> None:
    threads = torch.get_num_threads()
    assert {one.count for one in measured_cpu.ceilings if one.quantity == "copy"} == {threads, 1}
    assert {one.count for one in measured_cpu.ceilings if one.quantity == "attention"} == {threads}


def test_a_product_that_slows_down_is_slower_when_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.001 if now < 1 else 0.002  # a limit that acts after a second

    monkeypatch.setattr(sustained.time, "perf_counter", lambda: now)
    monkeypatch.setattr(sustained.time, "sleep", lambda seconds: None)
    summaries: dict[str, Summary] = {}
    burst, held = hold(call, 100, 5, summaries, dtype="float32", batch=4)
    assert (burst.quantity, burst.value) == ("product, burst", pytest.approx(2e6 / 0.001))
    assert (held.quantity, held.value) == ("product, sustained", pytest.approx(2e6 / 0.002))
    assert summaries == dict.fromkeys(("product, burst", "product, sustained"), Summary(None, None, None, ()))
