"""What is made of a driver's answers: units, reasons, and None for what it does not tell."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strata.hardware.dcgm import FieldValue, activity_reader
from strata.hardware.nvml import Nvml, NvmlDevice, open_nvml
from strata.hardware.telemetry import Summary, TelemetryReading, TelemetrySampler

NOT_SUPPORTED = 3


class Library:
    """A library as ctypes loads it: writes into the last argument and returns 0, or a code."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            answer = self.answers[name]
            value = answer(*arguments[1:-1]) if callable(answer) else answer
            if value is None:
                return NOT_SUPPORTED
            arguments[-1]._obj.value = value
            return 0

        return call


def device(**answers: Any) -> NvmlDevice:
    return NvmlDevice(Library(**answers), ctypes.c_void_p(1))


def test_answers_in_si_units() -> None:
    one = device(
        nvmlDeviceGetPowerUsage=698_500,
        nvmlDeviceGetEnforcedPowerLimit=700_000,
        nvmlDeviceGetClockInfo=lambda kind: {1: 1755, 2: 3201}[kind.value],
        nvmlDeviceGetTemperature=61,
        nvmlDeviceGetCurrPcieLinkGeneration=5,
        nvmlDeviceGetCurrPcieLinkWidth=16,
        nvmlDeviceGetNvLinkState=lambda link: 1 if link.value < 12 else None,
    )
    assert (one.power(), one.power_limit(), one.temperature()) == (698.5, 700, 61)
    assert (one.clock("sm"), one.clock("memory")) == (1755e6, 3201e6)
    assert (one.pcie(), one.links()) == ((5, 16), 12)


def test_reasons_are_bits_and_what_slows_nothing_is_left_out() -> None:
    reasons = {0x4 | 0x1: ("power limit",), 0x60: ("thermal limit", "thermal limit of the hardware"), 0x1: ()}
    for bits, expected in reasons.items():
        assert device(nvmlDeviceGetCurrentClocksThrottleReasons=bits).slowed_by() == expected


def test_what_a_driver_does_not_tell_is_none() -> None:
    old = device()
    assert (old.power(), old.clock("sm"), old.slowed_by(), old.pcie(), old.links()) == (None, None, None, None, 0)
    assert device(nvmlDeviceGetPowerUsage=None).power() is None
    assert old.way_to(device()) is None
    assert open_nvml(["libthat-is-not-here.so"]) is None


def test_ways_between_devices_and_devices_by_uuid() -> None:
    library = Library(nvmlDeviceGetTopologyCommonAncestor=50, nvmlDeviceGetHandleByUUID=7)
    one = Nvml(library).device("GPU-1")
    assert one is not None
    assert one.way_to(device()) == "processors"
    assert Nvml(Library(nvmlDeviceGetHandleByUUID=None)).device("GPU-2") is None


def test_a_sampler_reads_while_it_is_open() -> None:
    clocks = iter(range(10_000))
    one = device(nvmlDeviceGetPowerUsage=100_000, nvmlDeviceGetClockInfo=lambda kind: next(clocks))
    with TelemetrySampler(one, interval=0.001) as sampler:
        while len(sampler.readings) < 3:
            pass
    count = len(sampler.readings)
    assert [one.clock for one in sampler.readings] == [1e6 * number for number in range(count)]
    assert sampler.between(sampler.readings[1].seconds, sampler.readings[2].seconds) == sampler.readings[1:3]
    with TelemetrySampler(None) as empty:
        pass
    assert empty.readings == []


def test_summaries() -> None:
    readings = [
        TelemetryReading(0, 600, 1.9e9, 50, (), {"SMs active": 0.5}),
        TelemetryReading(1, 700, 1.7e9, 60, ("power limit",), {"SMs active": 1.0}),
        TelemetryReading(2, *[None] * 4),
    ]
    assert Summary.of(readings) == Summary(650, 1.8e9, 60, ("power limit",), {"SMs active": 0.75})
    assert Summary.of([]) == Summary(None, None, None, ())


class Dcgm:
    """DCGM as ctypes loads it, of two GPUs whose fields are ready; or one that refuses a call, by its name."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.calls = refuses, list[str]()
        # dcgmFieldValue_v1: 24 bytes in front of a union of 4,096.
        assert (ctypes.sizeof(FieldValue), FieldValue.value.offset, FieldValue.status.offset) == (4120, 24, 8)

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.calls.append(name)
            if name == self.refuses:
                return -26
            if name == "dcgmGetAllDevices":
                given[1][0], given[1][1], given[2]._obj.value = 0, 1, 2
            if name == "dcgmGetLatestValuesForFields":
                _, number, fields, count, values = given
                for field, value in zip(fields, values, strict=True):
                    value.field, value.status = field, 0 if field != 1003 else -7
                    if field == 54:
                        value.value.text = f"GPU-{number}".encode()
                    else:
                        value.value.real = {1002: 0.75, 1003: 0.5, 1004: 0.25, 1005: 140737488355328.0}[field]
                assert count == len(fields) == 5
            return 0

        return call


def rated(uuid: bytes) -> NvmlDevice:
    class Rates:
        def nvmlDeviceGetUUID(self, _: Any, text: Any, length: Any) -> int:
            text.value = uuid
            return 0

        def nvmlDeviceGetUtilizationRates(self, _: Any, told: Any) -> int:
            told._obj.gpu, told._obj.memory = 90, 40
            return 0

    return NvmlDevice(Rates(), ctypes.c_void_p(1))


def test_activity_is_dcgms_where_it_is_there() -> None:
    library = Dcgm()
    with activity_reader(rated(b"GPU-1"), lambda _: library) as read:
        # A field that is not told, or blank, is left out.
        assert read() == {"SMs active": 0.75, "tensor cores active": 0.25}
        assert "dcgmStopEmbedded" not in library.calls
    assert library.calls[-1] == "dcgmStopEmbedded"


@pytest.mark.parametrize(
    "library",
    [None, *map(Dcgm, ("dcgmInit", "dcgmStartEmbedded", "dcgmWatchFields", "dcgmGetLatestValuesForFields"))],
    ids=lambda one: getattr(one, "refuses", "none"),
)
def test_activity_is_nvmls_else(library: Dcgm | None) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(name)
        return library

    with activity_reader(rated(b"GPU-1"), load) as read:
        assert read() == {"kernels running": 0.9, "memory in use": 0.4}
    with activity_reader(rated(b"GPU-7"), lambda _: Dcgm()) as read:  # one that DCGM does not see
        assert read() == {"kernels running": 0.9, "memory in use": 0.4}
    with activity_reader(None, load) as read:
        assert read() == {}
    if library is not None and library.refuses not in ("dcgmInit", "dcgmStartEmbedded"):
        assert library.calls[-1] == "dcgmStopEmbedded"
