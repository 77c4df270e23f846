"""A whole probe of this machine: the ceilings of one of its devices, and what can be told of all of them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strata.hardware.machine import numa_node, processor
from strata.hardware.nvml import Nvml, NvmlDevice, open_nvml
from strata.hardware.probe import cpu, cuda
from strata.hardware.probe.ceiling import Measured, ProbeItem
from strata.hardware.probe.report import Gpu, ProbeReport
from strata.hardware.telemetry import Summary

# Of a minute: what a product is held for, long enough for a power limit to act.
_HELD_SECONDS = 5.0

# Makes parts that need several GPUs, from how many there are and when the time is over.
MoreParts = Callable[[int, float], Sequence[ProbeItem]]


def probe(kind: str, seconds: float, more: MoreParts | None = None) -> ProbeReport:
    """Measure for at most about so many seconds; what does not fit is said to be missing.

    kind: "cpu", or "cuda" for the current GPU. more: with several GPUs, parts that the floors above this one measure.
    """
    start = time.perf_counter()
    end = start + seconds
    measured, summaries = Measured(), dict[str, Summary]()
    gpus: tuple[Gpu, ...] = ()
    versions: dict[str, str | None] = {"torch": torch.__version__}
    here = processor()
    product = here.name
    if kind == "cuda":
        nvml = open_nvml()
        device = torch.device("cuda", torch.cuda.current_device())
        telemetry = None if nvml is None else _telemetry(nvml, device.index)
        versions |= {"cuda": torch.version.cuda, "driver": None if nvml is None else nvml.driver()}
        product = torch.cuda.get_device_name(device)
        measured.run(cuda.probe_items(device, telemetry, min(_HELD_SECONDS, seconds / 8), summaries), end)
        gpus = _gpus(nvml)  # now, since a link to the host goes down while a GPU is idle
        if telemetry is None:
            measured.missing["telemetry"] = "no NVML: its library comes with NVIDIA's driver and is not here"
        torch.cuda.empty_cache()
        if more is not None and len(gpus) > 1:
            measured.run(more(len(gpus), end), end)
    else:
        measured.run(cpu.probe_items(summaries), end)
    return ProbeReport(
        product,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        time.perf_counter() - start,
        here,
        gpus,
        tuple(measured.ceilings),
        summaries,
        measured.missing,
        versions,
    )


def _gpus(nvml: Nvml | None) -> tuple[Gpu, ...]:
    """All that are visible to this process, in its order."""
    count = torch.cuda.device_count()
    told = [None if nvml is None else _telemetry(nvml, index) for index in range(count)]
    return tuple(_gpu(index, told) for index in range(count))


def _gpu(index: int, told: list[NvmlDevice | None]) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)
    others = [peer for peer in range(len(told)) if peer != index]
    address = None  # of builds of torch that do not tell
    if hasattr(properties, "pci_bus_id"):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    common = {
        "product": properties.name,
        "uuid": f"GPU-{properties.uuid}",
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "processors": properties.multi_processor_count,
        "peers": tuple(peer for peer in others if torch.cuda.can_device_access_peer(index, peer)),
        "numa": None if address is None else numa_node(address),
    }
    one = told[index]
    if one is None:
        return Gpu(**common)
    return Gpu(
        **common,
        power_limit=one.power_limit(),
        max_clock=one.max_clock("sm"),
        pcie=one.pcie(),
        links=one.links(),
        ways=tuple(None if other is None or other is one else one.way_to(other) for other in told),
    )


def _telemetry(nvml: Nvml, index: int) -> NvmlDevice | None:
    properties: Any = torch.cuda.get_device_properties(index)
    return nvml.device(f"GPU-{properties.uuid}")
