"""The device database: every device by its name here, of all makers. What a device and its figures are: `figures`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strata.hardware.figures import Cuda, Device, Figure, Source, promised, reached


def _listed(table: dict[str, Any]) -> Iterator[Device]:
    """The devices of `devices.toml`."""
    sources = {name: Source(**one) for name, one in table["sources"].items()}
    for one in table["devices"]:
        figures: list[Figure] = []
        for said in one["promised"]:
            figures += promised(sources[said.pop("source")], **said)
        for found in one.get("measured", ()):
            figures += reached(**found)
        yield Device(one["key"], one["product"], tuple(figures), _cuda(**one["cuda"]) if "cuda" in one else None)


def _cuda(capability: list[int], shared_kib: int, processors: int, **held: int) -> Cuda:
    return Cuda((capability[0], capability[1]), shared_kib * 1024, processors, **held)


DEVICES: dict[str, Device] = {
    one.key: one for one in _listed(tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")))
}


def device(key: str) -> Device:
    """The device of that name. Raises ValueError, naming those known, if there is none."""
    if key not in DEVICES:
        raise ValueError(f"device {key!r} is unknown; known are {', '.join(DEVICES)}")
    return DEVICES[key]


def cuda_device(key: str, others: str = "") -> Device:
    """The same, of those that run CUDA kernels. others: what else may be given, in words. Raises ValueError, naming
    what is accepted, for any other name."""
    if key not in DEVICES or DEVICES[key].cuda is None:
        why = f"is {DEVICES[key].product}, which runs no CUDA kernels" if key in DEVICES else "is unknown"
        able = ", ".join(name for name, known in DEVICES.items() if known.cuda is not None)
        raise ValueError(f"device {key!r} {why}; give one of {able}{others}")
    return DEVICES[key]


def device_to_plan(key: str) -> Device:
    """The same, of which enough is known to plan for. Raises ValueError, naming those, for any other name."""
    if key not in DEVICES:
        raise ValueError(f"device {key!r} is unknown; plans are made for {', '.join(_planned())}")
    check_planned(DEVICES[key])
    return DEVICES[key]


def check_planned(known: Device, dtype: str | None = None) -> None:
    """Raises ValueError, naming the devices to choose from, for one of which too little is known to plan for: its peak
    in `dtype` (None: in any), its bandwidth or its memory."""
    if _is_planned(known, dtype):
        return
    peaks = ", ".join(sorted(known.dtypes()))
    needed = {"bandwidth": "bandwidth", "memory": "size of memory"}
    missing = [words for name, words in needed.items() if known.known(name) is None]
    if not peaks:
        missing.insert(0, "peak")
    elif known.known("compute", dtype) is None:
        missing.insert(0, f"peak in {dtype} (but in {peaks})")
    here = ""
    if not peaks:
        here = "; strata explain and strata graph --hardware cpu look at this machine's processor, which they measure"
    raise ValueError(
        f"nothing is planned for {known.key}, of which no {' and no '.join(missing)} is recorded: choose one of "
        f"{', '.join(_planned(dtype))}{here}"
    )


def _planned(dtype: str | None = None) -> list[str]:
    return [key for key, known in DEVICES.items() if _is_planned(known, dtype)]


def _is_planned(known: Device, dtype: str | None) -> bool:
    has_peak = known.known("compute", dtype) is not None if dtype else bool(known.dtypes())
    return has_peak and known.known("bandwidth") is not None and known.known("memory") is not None


def recognize(product: str) -> Device | None:
    """The device that a driver or system reports under this name, or None if it is not in the database."""
    return next((known for known in DEVICES.values() if known.product == product), None)
