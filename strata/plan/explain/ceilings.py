"""What a run's steps are held against: the predicted steps of its model on the device that it ran on."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strata.cost.step_model import StepSeconds
from strata.engine.engine_config import MAX_NUM_SEQS
from strata.hardware.figures import Device
from strata.hardware.machine import cpu_name, processor
from strata.hardware.probe import cpu
from strata.hardware.probe.ceiling import Measured
from strata.hardware.probe.device import device_of
from strata.hardware.probe.report import ProbeReport, kept, newest
from strata.hardware.specs import DEVICES, recognize
from strata.models.config import DTYPES, ModelConfig
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import meta_model

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
    `StepSeconds` reads itself), or else, and for what that lacks, a second of measuring now.

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
    here: Here | None = None
    if torch.cuda.is_available() and asked != PROCESSOR:
        product = torch.cuda.get_device_name()
        found = recognize(product)
        if found is None:
            raise ValueError(f"{product} is not in the device database, so nothing tells the floors of steps on it")
        here = Here(found, is_processor=False)
    else:
        product = cpu_name()
        known = recognize(product)
        if asked in (None, PROCESSOR) or (known is not None and asked == known.key):
            device, sources = processor_device()
            return Here(device, is_processor=True, sources=sources)
    if here is None or asked not in (None, here.device.key):
        raise ValueError(
            f"device {asked!r} is not here, and what is measured runs on {product}: leave it out, or give "
            f"{PROCESSOR}, the processor"
        )
    return here


def steps_on_processor(
    config: ModelConfig,
    dtype: str,
    device: Device,
    deterministic: bool = False,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    folder: Path | None = None,
) -> StepSeconds:
    """dtype: as torch names it. folder: of the checkpoint, which may be packed.

    Raises ValueError if no peak in it is known of the processor.
    """
    options: dict[str, Any] = {"deterministic": deterministic, "quantization": quantization}
    options["kv_cache_dtype"] = kv_cache_dtype
    return StepSeconds(meta_model(config, None, DTYPES[dtype], folder=folder, **options), device)


def steps_on_gpu(
    config: ModelConfig,
    dtype: str,
    product: str,
    deterministic: bool = False,
    shard: RankShard | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    folder: Path | None = None,
    *,
    max_sequences: int = MAX_NUM_SEQS,
) -> StepSeconds:
    """product: as the driver names it. folder: as for `steps_on_processor`. max_sequences: that the engine runs.

    Raises ValueError for a device that is not in the database.
    """
    device = recognize(product)
    if device is None:
        known = ", ".join(one.product for one in DEVICES.values() if one.cuda is not None)
        raise ValueError(f"{product} is not in the device database, so nothing tells its floors; known are {known}")
    options: dict[str, Any] = {"deterministic": deterministic, "quantization": quantization}
    options["kv_cache_dtype"] = kv_cache_dtype
    model = meta_model(config, device, DTYPES[dtype], shard, folder=folder, max_num_seqs=max_sequences, **options)
    return StepSeconds(model, device)
