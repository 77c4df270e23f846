"""Memory by NVML: which GPUs, and what is read of each, by a library that stands in for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strata.hardware import gpu_memory
from strata.hardware.gpu_memory import GpuMemory, gpu_memories, memories_by

GIB = 1 << 30


class FakeNvml:
    """Two GPUs; the second has the UUID GPU-two. A handle is the number of the GPU from 1."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.open = fails, 0

    def nvmlInit_v2(self) -> int:
        self.open += not self.fails
        return int(self.fails)

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return int(index.value > 1)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return int(uuid != b"GPU-two")

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: Any, size: ctypes.c_uint) -> None:
        name.value = f"H{handle.value}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> None:
        found = memory._obj
        found.total, found.used = 140 * GIB, (handle.value or 0) * GIB


FIRST, SECOND = GpuMemory("H1", 140 * GIB, GIB), GpuMemory("H2", 140 * GIB, 2 * GIB)


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
    library = FakeNvml()
    assert memories_by(library, visible) == expected
    assert library.open == 0


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memories_by(FakeNvml(fails=True), None) == []
    monkeypatch.setattr(gpu_memory, "_LIBRARY", "libno-such-driver.so.1")
    assert gpu_memories() == []
