"""How busy the parts of NVIDIA's GPUs are, by DCGM, whose library is loaded by ctypes where it is installed.

Its profiling fields are shares of time, or of what could be busy, over a tenth of a second. NVML knows two that are
coarser; they have names of their own. https://docs.nvidia.com/datacenter/dcgm/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from strata.hardware.nvml import NvmlDevice

_LIBRARIES = ("libdcgm.so.4", "libdcgm.so.3")
_UUID = 54
FIELDS = {1002: "SMs active", 1003: "warps resident", 1004: "tensor cores active", 1005: "memory active"}
_AUTOMATIC = 1  # DCGM's own thread updates what is watched
_ALL_GPUS = 0  # a group's kind
_MAX_GPUS = 32
_INTERVAL_MICROSECONDS, _KEPT_SECONDS = 100_000, 5.0
_BLANK = float(1 << 47)  # and above: no value

Reader = Callable[[], dict[str, float]]


class _Value(ctypes.Union):
    _fields_ = (
        ("whole", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("text", ctypes.c_char * 256),
        ("blob", ctypes.c_char * 4096),
    )


class FieldValue(ctypes.Structure):
    """dcgmFieldValue_v1."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("field", ctypes.c_ushort),
        ("kind", ctypes.c_ushort),
        ("status", ctypes.c_int),
        ("time", ctypes.c_int64),
        ("value", _Value),
    )


@contextmanager
def activity_reader(device: NvmlDevice | None, load: Callable[[str], Any] = ctypes.CDLL) -> Iterator[Reader]:
    """What tells, as long as the context is open, how busy a device is: shares by name, of `FIELDS` where DCGM is
    installed and may profile, else of `NvmlDevice.utilization`; none without a device."""
    library, handle = None if device is None else _loaded(load), ctypes.c_size_t()
    if device is None or library is None or library.dcgmStartEmbedded(_AUTOMATIC, ctypes.byref(handle)) != 0:
        yield dict if device is None else device.utilization
        return
    try:
        yield _watched(library, handle, device.uuid()) or device.utilization
    finally:
        library.dcgmStopEmbedded(handle)


def _loaded(load: Callable[[str], Any]) -> Any:
    for name in _LIBRARIES:
        try:
            library = load(name)
        except OSError:
            continue
        if library.dcgmInit() == 0:
            return library
    return None


def _watched(library: Any, handle: ctypes.c_size_t, uuid: str | None) -> Reader | None:
    """What reads the fields of a device; None if they cannot be watched, as by users who may not profile."""
    group, fields = ctypes.c_size_t(), ctypes.c_size_t()
    wanted = (ctypes.c_ushort * (1 + len(FIELDS)))(_UUID, *FIELDS)
    often = ctypes.c_longlong(_INTERVAL_MICROSECONDS), ctypes.c_double(_KEPT_SECONDS), 0
    count, numbers = ctypes.c_int(), (ctypes.c_uint * _MAX_GPUS)()
    for function, *given in (
        (library.dcgmGroupCreate, _ALL_GPUS, b"strata", ctypes.byref(group)),
        (library.dcgmFieldGroupCreate, len(wanted), wanted, b"strata", ctypes.byref(fields)),
        (library.dcgmWatchFields, group, fields, *often),
        (library.dcgmUpdateAllFields, 1),
        (library.dcgmGetAllDevices, numbers, ctypes.byref(count)),
    ):
        if function(handle, *given) != 0:
            return None

    def values(number: int) -> dict[int, _Value]:
        told = (FieldValue * len(wanted))()
        if library.dcgmGetLatestValuesForFields(handle, number, wanted, len(wanted), told) != 0:
            return {}
        return {one.field: one.value for one in told if one.status == 0}

    def read(number: int) -> dict[str, float]:
        told = values(number)
        return {name: told[field].real for field, name in FIELDS.items() if field in told and told[field].real < _BLANK}

    for number in numbers[: count.value]:
        own = values(number).get(_UUID)
        if own is not None and own.text.decode() == uuid:
            return lambda: read(number)
    return None
