"""The device database: every device by its name here, of all makers. What a device and its figures are: `figures`."""

from __future__ import annotations

from strata.hardware.devices.accelerators import ACCELERATORS
from strata.hardware.devices.amd import AMD
from strata.hardware.devices.nvidia import NVIDIA
from strata.hardware.devices.processors import PROCESSORS
from strata.hardware.figures import Device

DEVICES: dict[str, Device] = {one.key: one for one in (*NVIDIA, *AMD, *ACCELERATORS, *PROCESSORS)}


def device(key: str) -> Device:
    """The device of that name. Raises ValueError, naming those known, if there is none."""
    if key not in DEVICES:
        raise ValueError(f"device {key!r} is unknown; known are {', '.join(DEVICES)}")
    return DEVICES[key]


def recognize(product: str) -> Device | None:
    """The device that a driver or system reports under this name, or None if it is not in the database."""
    return next((known for known in DEVICES.values() if known.product == product), None)
