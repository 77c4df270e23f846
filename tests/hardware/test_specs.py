"""The device database against what its figures follow from and each other, and the table of the docs against it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from strata.hardware import measured
from strata.hardware.figures import MIB, Device, Source, promised
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import kept
from strata.hardware.specs import DEVICES, check_planned, device, device_to_plan, recognize
from strata.kernels import tuned

RATES = ("bandwidth", "compute", "sustained", "link", "host")
QUANTITIES = (*RATES, "memory", "l2", "l3", "power", "launch", "kernel", "step")
ACCELERATORS = [one for one in DEVICES.values() if one.dtypes()]


def test_measured_figures_are_preferred_and_promised_ones_stay() -> None:
    h200 = device("h200")
    assert h200.ceiling("compute", "bfloat16").value == 800e12
    assert h200.ceiling("compute", "bfloat16", measured=False).value == pytest.approx(989.4e12)
    assert h200.ceiling("bandwidth").value == pytest.approx(4.28e12)
    assert h200.ceiling("bandwidth", measured=False).value == 4.8e12


@pytest.mark.parametrize("key", DEVICES)
def test_figures_are_complete_and_measured_below_promised(key: str) -> None:
    known = device(key)
    assert known.price_per_hour is None
    assert known.known("bandwidth") is not None
    for figure in known.figures:
        assert figure.quantity in QUANTITIES
        assert figure.value > 0
        assert figure.source
        assert figure.date.startswith("20")
        assert figure.measured or (figure.url or "").startswith("https://")
        assert (figure.dtype is not None) == (figure.quantity in ("compute", "sustained"))
        assert (figure.direction is not None) == (figure.quantity in ("bandwidth", "link", "host"))
        said = known.known(figure.quantity, figure.dtype, measured=False)
        if figure.measured and said is not None:
            assert figure.value <= said.value


def test_no_figure_is_recorded_twice() -> None:
    for known in DEVICES.values():
        names = [(one.quantity, one.dtype, one.sparse, one.measured) for one in known.figures]
        assert len(names) == len(set(names)), known.key
    products = [known.product for known in DEVICES.values()]
    assert len(products) == len(set(products))


def test_devices_that_cannot_be_planned_for_are_not_offered() -> None:
    """Processors, whose makers promise no clock: against the figures that a plan divides by."""
    offered = {
        one.key
        for one in DEVICES.values()
        if one.dtypes()
        and all(any(figure.quantity == name for figure in one.figures) for name in ("bandwidth", "memory"))
    }
    assert {"h200", "mi300x", "tpu-v5e", "gaudi3"} < offered < set(DEVICES)
    for key in ("nope", *(set(DEVICES) - offered)):
        with pytest.raises(
            ValueError, match=rf"^(device '{key}' is unknown|nothing is planned for {key}, ).* h200, "
        ) as raised:
            device_to_plan(key)
        names = re.split(r"choose one of |made for ", str(raised.value))[1].split(";")[0].split(", ")
        assert set(names) == offered
    for key in offered:
        assert device_to_plan(key) == DEVICES[key]


def test_a_peak_in_another_dtype_is_named() -> None:
    """Of Machine.of, by the dtype of a model: float16 of a TPU."""
    said = r"tpu-v5e, of which no peak in float16 \(but in bfloat16, int8\) is recorded: choose one of h200, .*"
    with pytest.raises(ValueError, match=said) as raised:
        check_planned(device("tpu-v5e"), "float16")
    assert "tpu-v5p" not in str(raised.value)
    with pytest.raises(ValueError, match="epyc-9654, of which no peak and no size of memory is recorded"):
        check_planned(device("epyc-9654"), "float32")


def test_every_device_asked_for_is_there() -> None:
    asked = (
        "a100 h100 h100-pcie h100-nvl h200 b200 gb200 mi300x mi355x ascend-910c tpu-v5e tpu-v5p tpu-v6e gaudi3 l4 l40s "
        "rtx4090 rtx5090 m3-ultra m4-max epyc-9654 xeon-6980p"
    )
    assert set(asked.split()) <= set(DEVICES)


@pytest.mark.parametrize(
    ("key", "dtype", "units", "per_clock", "gigahertz"),
    [
        # Multiprocessors, or compute units, and what each does in a clock.
        ("a100", "bfloat16", 108, 2048, 1.41),
        ("h100", "bfloat16", 132, 4096, 1.83),
        ("h100-pcie", "float8", 114, 8192, 1.62),
        ("l4", "bfloat16", 58, 1024, 2.04),
        ("rtx4090", "bfloat16", 128, 512, 2.52),
        ("rtx5090", "bfloat16", 170, 512, 2.407),
        ("mi300x", "float8", 304, 4096, 2.1),
        ("mi355x", "float8", 256, 8192, 2.4),
        # Matrix units: two operations for each place of the array.
        ("tpu-v5e", "bfloat16", 4, 2 * 128 * 128, 1.5),
        ("tpu-v5p", "bfloat16", 8, 2 * 128 * 128, 1.75),
        ("gaudi3", "bfloat16", 8, 2 * 256 * 256, 1.75),
        # Of two dies.
        ("ascend-910c", "bfloat16", 2, 376_000, 1.0),
    ],
)
def test_rates_are_units_times_clock(key: str, dtype: str, units: int, per_clock: int, gigahertz: float) -> None:
    expected = units * per_clock * gigahertz * 1e9
    assert device(key).ceiling("compute", dtype, measured=False).value == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("key", "lanes", "gigabytes"),
    [
        ("a100", 12, 25), ("h100", 18, 25), ("h100-pcie", 12, 25), ("h100-nvl", 12, 25), ("h200", 18, 25),
        ("b200", 18, 50), ("gb200", 18, 50), ("mi300x", 7, 64), ("mi355x", 7, 76.8), ("gaudi3", 24, 25),
        ("tpu-v5e", 4, 50), ("tpu-v5p", 6, 100), ("tpu-v6e", 4, 100),
    ],
)  # fmt: skip
def test_links_are_in_one_direction(key: str, lanes: int, gigabytes: float) -> None:
    assert device(key).ceiling("link", measured=False).value == pytest.approx(lanes * gigabytes * 1e9)


def test_links_to_the_host_are_sixteen_lanes_in_one_direction() -> None:
    for number, keys in ((4, "a100 l4 l40s rtx4090"), (5, "h100 h200 rtx5090 mi300x"), (6, "b200")):
        for key in keys.split():
            assert device(key).ceiling("host", measured=False).value == 32e9 * 2 ** (number - 4)


def test_memory_of_processors_is_channels_times_transfers() -> None:
    for key, transfers in (("epyc-9654", 4800e6), ("epyc-9755", 6400e6), ("xeon-6980p", 8800e6)):
        assert device(key).ceiling("bandwidth").value == pytest.approx(12 * 8 * transfers)


@pytest.mark.parametrize("known", ACCELERATORS, ids=lambda one: one.key)
def test_half_the_bits_is_twice_the_rate_and_sparsity_doubles(known) -> None:  # type: ignore[no-untyped-def]
    rates = {
        one.dtype: one.value for one in known.figures if one.quantity == "compute" and not one.measured | one.sparse
    }
    sparse = {one.dtype: one.value for one in known.figures if one.sparse}
    assert sparse == {dtype: 2 * rates[dtype] for dtype in sparse}
    # Gaudi 3 and TPU v5p multiply 8-bit floating point as fast as 16-bit.
    if "float8" in rates and known.key not in ("gaudi3", "tpu-v5p"):
        assert rates["float8"] == pytest.approx(2 * rates["bfloat16"], rel=0.02)
    if "int8" in rates and not known.key.startswith("rtx"):
        assert rates["int8"] == pytest.approx(2 * rates["bfloat16"], rel=0.02)
    if "tf32" in rates:
        assert rates["tf32"] == pytest.approx(rates["bfloat16"] / 2, rel=0.05)
    if "float4" in rates:
        assert rates["float4"] in (pytest.approx(2 * rates["float8"], rel=0.01), pytest.approx(4 * rates["float8"]))
    assert rates.get("float16", rates["bfloat16"]) == rates["bfloat16"]


@pytest.mark.parametrize("known", ACCELERATORS, ids=lambda one: one.key)
def test_units_are_those_of_the_time(known) -> None:  # type: ignore[no-untyped-def]
    """Operations for each byte, for each joule, and links beside memory: a slip of 1,000 falls out of these ranges."""
    rate = known.ceiling("compute", "bfloat16", measured=False).value
    assert 100 < rate / known.ceiling("bandwidth", measured=False).value < 600  # operations for each byte
    if (power := known.known("power")) is not None:
        assert 0.3e12 < rate / power.value < 2.3e12
    if (link := known.known("link", measured=False)) is not None:
        assert 0.05 < link.value / known.ceiling("bandwidth", measured=False).value < 0.35


def test_sparsity_doubles_what_datasheets_print() -> None:
    # The headline figures of the datasheets, in TFLOP/s with 2:4 sparsity.
    for key, dtype, headline in [
        ("h100", "bfloat16", 1979),
        ("h100-nvl", "bfloat16", 1671),
        ("h200", "float8", 3958),
        ("a100", "bfloat16", 624),
        ("b200", "float8", 9000),
        ("l4", "float8", 485),
        ("l40s", "float8", 1466),
        ("rtx4090", "bfloat16", 330.4),
        ("rtx5090", "float4", 3352),
        ("mi300x", "float8", 5229.8),
    ]:
        sparse = [f.value for f in device(key).figures if f.sparse and f.dtype == dtype]
        assert sparse == [pytest.approx(headline * 1e12, rel=1e-3)]
        assert device(key).ceiling("compute", dtype, measured=False).value == pytest.approx(headline * 5e11, rel=1e-3)


def test_what_no_source_says_is_unknown() -> None:
    assert device("ascend-910c").known("link") is None  # sources disagree
    assert device("m3-ultra").known("compute", "float16") is None
    with pytest.raises(ValueError, match="no compute in bfloat16 is recorded for epyc-9654"):
        device("epyc-9654").ceiling("compute", "bfloat16")


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(ValueError, match="'h300' is unknown; known are h200, h100, h100-pcie"):
        device("h300")
    with pytest.raises(ValueError, match=r"no compute in float8 is recorded for a100; known: bfloat16"):
        device("a100").ceiling("compute", "float8")


def test_products_are_recognized_by_the_name_that_drivers_give() -> None:
    assert recognize("NVIDIA H200") is device("h200")
    assert recognize("NVIDIA H100 PCIe") is device("h100-pcie")
    assert recognize("NVIDIA H200 NVL") is None  # another board with other figures
    assert recognize("Intel(R) Xeon(R)") is None


def test_the_price_is_the_users() -> None:
    with pytest.raises(ValueError, match="the price of h200 is not known here"):
        device("h200").priced(3600)
    assert replace(device("h200"), price_per_hour=2.5).priced(1800, devices=8) == pytest.approx(10)


def test_what_a_source_says_in_its_units() -> None:
    source = Source("a sheet", "https://example.com", "2026-01")
    memory, cache, host, dense, doubled = promised(
        source, memory=80, l2=50, host=64, dense={"bfloat16": 100}, sparse=["bfloat16", "int8"]
    )
    assert (memory.value, cache.value, host.value, host.direction) == (80e9, 52_428_800, 32e9, "each")
    assert (dense.value, dense.sparse, doubled.value, doubled.sparse) == (100e12, False, 200e12, True)
    assert {one.url for one in (memory, cache, host, dense, doubled)} == {"https://example.com"}


DOCUMENT = Path(__file__).parents[2] / "docs" / "hardware.md"


def said(device: Device, quantity: str, unit: float, dtype: str | None = None) -> str:
    """A figure with at most four digits, a dash where none is known."""
    figure = device.known(quantity, dtype, measured=False) or device.known(quantity, dtype)
    return "-" if figure is None else f"{float(f'{figure.value / unit:.4g}'):g}"


def row(device: Device) -> str:
    rates = " / ".join(said(device, "compute", 1e12, dtype) for dtype in ("bfloat16", "float8", "int8", "float4"))
    others = [
        said(device, quantity, unit)
        for quantity, unit in (
            ("memory", 1e9), ("bandwidth", 1e12), ("l2", MIB), ("l3", MIB), ("link", 1e9), ("host", 1e9), ("power", 1),
        )
    ]  # fmt: skip
    return f"| {' | '.join([f'`{device.key}`', rates, *others])} |"


def test_the_documented_table_is_the_database() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| device |")) + 2
    assert lines[first : lines.index("", first)] == [row(device) for device in DEVICES.values()]


# Of each device that was measured: what the document calls it, in which unit, to so many digits.
REACHED = {
    "bf16, T/s": ("compute", "bfloat16", 1e12),
    "fp8, T/s": ("compute", "float8", 1e12),
    "int8, T/s": ("compute", "int8", 1e12),
    "bf16 held for seconds, T/s": ("sustained", "bfloat16", 1e12),
    "memory, read plus written, TB/s": ("bandwidth", None, 1e12),
    "host, GB/s": ("host", None, 1e9),
    "launch by the host, us": ("launch", None, 1e-6),
    "kernel in a CUDA graph, us": ("kernel", None, 1e-6),
    "around a step, us": ("step", None, 1e-6),
}
TABLES = {
    "tuned products": tuned.FOLDER,
    "thresholds": tuned.FOLDER.with_name("thresholds"),
    "measured calls": measured.FOLDER,
}


def reached(key: str, quantity: str, dtype: str | None, unit: float) -> str:
    figure = device(key).known(quantity, dtype)
    return "-" if figure is None or not figure.measured else f"{figure.value / unit:.4g}"


def test_what_was_reached_has_one_form_for_all_devices() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| reached |")) + 2
    keys = ("h200", "h100")
    rows = [[name, *(reached(key, *of) for key in keys)] for name, of in REACHED.items()] + [
        [name, *("yes" if measured.path_of(device(key).product, folder).is_file() else "-" for key in keys)]
        for name, folder in TABLES.items()
    ]
    assert lines[first : lines.index("", first)] == [f"| {' | '.join(row)} |" for row in rows]


def test_the_h100_reached_what_its_probe_found() -> None:
    """The report of `strata probe` that is committed, to four digits; copies as one of many sizes."""
    report = kept(DOCUMENT.parents[1] / "benchmarks" / "results" / "h100_probe.json")
    probed, own = device_of(report), device("h100")
    for figure in probed.figures:
        known = own.known(figure.quantity, figure.dtype)
        if figure.measured and known is not None and known.measured:
            assert float(f"{known.value:.4g}") == pytest.approx(float(f"{figure.value:.4g}"), rel=2e-4), figure
    shared = {(one.quantity, one.dtype) for one in own.figures if one.measured}
    assert shared <= {(one.quantity, one.dtype) for one in probed.figures}
