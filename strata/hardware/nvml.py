"""What the driver tells of NVIDIA's GPUs, by NVML: clocks, power, temperature, memory, links.

The library comes with the driver and is loaded by ctypes, so that no package is needed; where there is no driver, as on
a CPU, `open_nvml` answers None. A value that a device or a virtual machine does not tell is None.
https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2}
_TEMPERATURE_GPU = 0
_NO_LINKS = 18  # the most that any device has
# Bits of nvmlClocksEventReasons; what is not listed does not slow a device that works.
REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "thermal limit of the hardware",
    0x80: "power brake",
}
# nvmlGpuTopologyLevel_t: what the way between two devices passes.
WAYS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "a host bridge",
    40: "host bridges of one NUMA node",
    50: "processors",
}


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The library, once it is initialized. Devices are those of UUIDs, which also tells them apart where only some of
    a machine's are visible to this process."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def device(self, uuid: str) -> NvmlDevice | None:
        """The device of a UUID such as "GPU-3f...", or None if the library does not know it."""
        handle = ctypes.c_void_p()
        code = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        return NvmlDevice(self._library, handle) if code == 0 else None

    def numbered(self, index: int) -> NvmlDevice | None:
        """The device of a number, in the order of the PCI bus, or None if there are not so many."""
        handle = ctypes.c_void_p()
        code = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        return NvmlDevice(self._library, handle) if code == 0 else None

    def count(self) -> int:
        """Devices of the machine."""
        count = ctypes.c_uint()
        code = self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return count.value if code == 0 else 0

    def driver(self) -> str | None:
        """The version of the driver."""
        text = ctypes.create_string_buffer(96)
        code = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return text.value.decode() if code == 0 else None


class NvmlDevice:
    """One GPU."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def power(self) -> float | None:
        """Watts that it takes now, over the last second or less."""
        return _scaled(self._number("nvmlDeviceGetPowerUsage"), 1e-3)

    def power_limit(self) -> float | None:
        """Watts that it is held to."""
        return _scaled(self._number("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    def clock(self, kind: str) -> float | None:
        """Hz; kind: "graphics", "sm" or "memory"."""
        return _scaled(self._number("nvmlDeviceGetClockInfo", _CLOCKS[kind]), 1e6)

    def max_clock(self, kind: str) -> float | None:
        """Hz that it may reach."""
        return _scaled(self._number("nvmlDeviceGetMaxClockInfo", _CLOCKS[kind]), 1e6)

    def temperature(self) -> float | None:
        """Degrees Celsius of the chip."""
        return _scaled(self._number("nvmlDeviceGetTemperature", _TEMPERATURE_GPU), 1.0)

    def slowed_by(self) -> tuple[str, ...] | None:
        """Of `REASONS`, those why its clocks are lower than they may be."""
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return None if bits is None else tuple(name for bit, name in REASONS.items() if bits & bit)

    def memory(self) -> tuple[int, int] | None:
        """Bytes in all, and bytes that all processes and the driver have in use."""
        told = _Memory()
        code = self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(told))
        return (told.total, told.used) if code == 0 else None

    def uuid(self) -> str | None:
        """As "GPU-3f..."."""
        text = ctypes.create_string_buffer(96)
        code = self._library.nvmlDeviceGetUUID(self._handle, text, ctypes.c_uint(len(text)))
        return text.value.decode() if code == 0 else None

    def utilization(self) -> dict[str, float]:
        """Shares of the last sixth of a second or more in which a kernel ran, and in which memory was read or written;
        nothing if it does not tell."""
        told = _Utilization()
        code = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(told))
        return {"kernels running": told.gpu / 100, "memory in use": told.memory / 100} if code == 0 else {}

    def pcie(self) -> tuple[int, int] | None:
        """Generation and lanes of its link to the host, as they are now: both go down while it is idle."""
        generation = self._number("nvmlDeviceGetCurrPcieLinkGeneration")
        lanes = self._number("nvmlDeviceGetCurrPcieLinkWidth")
        return None if generation is None or lanes is None else (generation, lanes)

    def links(self) -> int:
        """NVLinks that are up."""
        return sum(self._number("nvmlDeviceGetNvLinkState", link) == 1 for link in range(_NO_LINKS))

    def way_to(self, other: NvmlDevice) -> str | None:
        """Of `WAYS`, the one over PCIe to another device."""
        level = self._number("nvmlDeviceGetTopologyCommonAncestor", other._handle)
        return None if level is None else WAYS.get(level)

    def _number(self, function: str, *arguments: int | ctypes.c_void_p, kind: Any = ctypes.c_uint) -> int | None:
        call: Callable[..., int] | None = getattr(self._library, function, None)
        if call is None:  # a driver without it
            return None
        value = kind()
        given = (ctypes.c_uint(one) if isinstance(one, int) else one for one in arguments)
        code = call(self._handle, *given, ctypes.byref(value))
        return int(value.value) if code == 0 else None


def open_nvml(names: Sequence[str] = (_LIBRARY,)) -> Nvml | None:
    """The library, or None where there is none or where it finds no driver."""
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if library.nvmlInit_v2() == 0:
            return Nvml(library)
    return None


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit
