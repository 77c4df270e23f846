"""What is made of a driver's answers: units, reasons, None for what it does not tell, and the memory of GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strata.hardware.gpu_memory import GpuMemories, GpuMemory, visible_devices
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


GIB = 1 << 30


class FakeLibrary:
    """Two GPUs; the second has the UUID GPU-two. A handle is the number of the GPU from 1."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return int(index.value > 1)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return int(uuid != b"GPU-two")

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 140 * GIB, (handle.value or 0) * GIB
        return 0


class SilentLibrary(FakeLibrary):
    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        return 3


FIRST, SECOND = GpuMemory(140 * GIB, GIB), GpuMemory(140 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [FIRST, SECOND]),
        ("1,0", [SECOND, FIRST]),
        ("GPU-two", [SECOND]),
        ("", []),
        ("0, 7", [FIRST]),  # CUDA does not see a GPU that is not there, either
    ],
)
def test_gpus_that_a_process_may_use(visible: str | None, expected: list[GpuMemory]) -> None:
    assert GpuMemories(visible_devices(Nvml(FakeLibrary()), visible)).read() == expected


def test_what_is_not_told_of_one_is_told_of_none() -> None:
    assert GpuMemories(visible_devices(Nvml(SilentLibrary()), None)).read() == []
    assert GpuMemories([]).read() == []
