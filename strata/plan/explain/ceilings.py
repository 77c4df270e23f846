"""What a run's steps are held against: the predicted steps of its model on the device that it ran on."""

from __future__ import annotations

import datetime
import time
from typing import NamedTuple

import torch

from strata.hardware.figures import Device
from strata.hardware.machine import cpu_name, processor
from strata.hardware.probe import cpu
from strata.hardware.probe.ceiling import Measured
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import ProbeReport, kept, newest
from strata.hardware.specs import DEVICES, recognize

# The name of this machine's, whichever it is.
PROCESSOR = "cpu"
# A second of copies and products, where no probe of the processor was kept.
_QUICK = cpu.CpuSizes(copied=64 << 20, squares=(512,), rows=(1, 16), width=1024, call=0.05)
_QUICK_PARTS = 3  # copies, and products in two dtypes
_TURNS = 3  # the best counts: others may have the processor for a while
# What floors of steps are made of. A probe of few seconds may have found less.
_NEEDED = {"copies": ("bandwidth", None), "float32": ("compute", "float32"), "bfloat16": ("compute", "bfloat16")}


def processor_device() -> tuple[Device, tuple[str, ...]]:
    """This machine's processor with what it reaches, and where that comes from: by the probe that was kept (which
    `StepModel` reads itself), or else, and for what that lacks, a second of measuring now.

    Raises ValueError, naming it, for a probe's file that cannot be read.
    """
    name = cpu_name()
    path, lacking = newest(name), list(_NEEDED)
    if path is not None:
        probed = device_of(kept(path))
        lacking = [what for what, of in _NEEDED.items() if probed.known(*of) is None]
        if not lacking:
            return recognize(name) or Device("processor", name, ()), ()
    measured, began = Measured(), time.perf_counter()
    measured.run(_TURNS * cpu.probe_items({}, _QUICK)[:_QUICK_PARTS], began + 60)
    took = time.perf_counter() - began
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = ProbeReport(
        name, today, took, processor(), (), tuple(measured.ceilings), versions={"torch": torch.__version__}
    )
    what = "ceilings" if path is None else f"ceilings ({', '.join(lacking)})"
    return device_of(report), (f"{what} of {name} measured now in {took:.1f} s; `strata probe` measures them well",)


class Here(NamedTuple):
    """The device of this machine that steps run on. sources: of its ceilings, in words."""

    device: Device
    is_processor: bool
    sources: tuple[str, ...] = ()


def device_here(asked: str | None) -> Here:
    """The GPU that is here, or else the processor. asked: the key of a device, or "cpu" for the processor; None:
    whichever is here.

    Raises ValueError if that one is not here, and for a GPU that is not in the database.
    """
    product = cpu_name()
    if torch.cuda.is_available() and asked != PROCESSOR:
        product = torch.cuda.get_device_name()
        here = recognize(product)
        if here is None:
            known = ", ".join(one.product for one in DEVICES.values() if one.cuda is not None)
            raise ValueError(f"{product} is not in the device database, so nothing tells its floors; known are {known}")
        if asked in (None, here.key):
            return Here(here, is_processor=False)
    elif asked in (None, PROCESSOR) or ((here := recognize(product)) is not None and asked == here.key):
        device, sources = processor_device()
        return Here(device, is_processor=True, sources=sources)
    raise ValueError(
        f"device {asked!r} is not here, and what is measured runs on {product}: leave it out, or give {PROCESSOR}, the "
        "processor"
    )
