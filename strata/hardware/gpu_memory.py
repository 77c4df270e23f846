"""The memory of GPUs as their driver counts it (NVML): of all processes, and without a context in this one, which
itself would take some of it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


@dataclass(frozen=True)
class GpuMemory:
    """name: of the product. total, used: bytes."""

    name: str
    total: int
    used: int


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in NVML's header."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memories() -> list[GpuMemory]:
    """Of each GPU that this process may use, in the order of CUDA_VISIBLE_DEVICES; none where NVML does not tell."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    return memories_by(library, os.environ.get("CUDA_VISIBLE_DEVICES"))


def memories_by(library: Any, visible: str | None) -> list[GpuMemory]:
    """library: NVML. visible: what CUDA_VISIBLE_DEVICES says: numbers and UUIDs between commas; None: all."""
    if library.nvmlInit_v2():
        return []
    try:
        handles = [_handle(library, one) for one in _chosen(library, visible)]
        return [_memory(library, handle) for handle in handles if handle is not None]
    finally:
        library.nvmlShutdown()


def _chosen(library: Any, visible: str | None) -> list[str]:
    if visible is not None:
        return [one.strip() for one in visible.split(",") if one.strip()]
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return [str(number) for number in range(count.value)]


def _handle(library: Any, device: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if device.isdecimal():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    return None if failed else handle


def _memory(library: Any, handle: ctypes.c_void_p) -> GpuMemory:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES))
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return GpuMemory(name.value.decode(), memory.total, memory.used)
