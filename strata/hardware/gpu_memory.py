"""The memory of GPUs as their driver counts it: of all processes, and without a context in this one, which itself would
take some of it."""

from __future__ import annotations

import os
from typing import NamedTuple

from strata.hardware.nvml import Nvml, NvmlDevice, open_nvml


class GpuMemory(NamedTuple):
    """Bytes."""

    total: int
    used: int


class GpuMemories:
    """Of each GPU that this process may use."""

    def __init__(self, devices: list[NvmlDevice]) -> None:
        self._devices = devices

    @classmethod
    def of_this_process(cls) -> GpuMemories:
        """By NVML and CUDA_VISIBLE_DEVICES; of no GPU where there is no driver."""
        nvml = open_nvml()
        return cls([] if nvml is None else visible_devices(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")))

    def read(self) -> list[GpuMemory]:
        """As it is now; nothing unless every device tells."""
        found = [device.memory() for device in self._devices]
        told = [GpuMemory(*one) for one in found if one is not None]
        return told if len(told) == len(found) else []


def visible_devices(nvml: Nvml, chosen: str | None) -> list[NvmlDevice]:
    """chosen: numbers and UUIDs between commas, as CUDA_VISIBLE_DEVICES has them; None: all. One that is not there is
    left out."""
    names = map(str, range(nvml.count())) if chosen is None else (name.strip() for name in chosen.split(","))
    found = (nvml.numbered(int(name)) if name.isdecimal() else nvml.device(name) for name in names if name)
    return [device for device in found if device is not None]
