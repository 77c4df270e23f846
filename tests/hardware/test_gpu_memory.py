"""Memory of GPUs: which GPUs, and what is read of each, by a library that stands in for the driver's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strata.hardware.gpu_memory import GpuMemories, GpuMemory, visible_devices
from strata.hardware.nvml import Nvml

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
