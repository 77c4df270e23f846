"""This machine as its system describes it: the processor, its caches and memory, where GPUs sit. Linux tells most."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Processor:
    """name: as the system has it. cores: that this process may run on. memory: bytes. caches: bytes of each cache that
    the first core uses, by level ("1d" for the data of level 1). nodes: NUMA nodes. Zero and empty: not known.
    """

    name: str
    cores: int
    memory: int
    caches: dict[str, int]
    nodes: int


def cpu_name() -> str:
    """The processor of this machine as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def processor(system: Path = Path("/sys/devices/system")) -> Processor:
    """What is known of this machine's processor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    nodes = len(list(system.glob("node/node[0-9]*")))
    return Processor(cpu_name(), cores, memory, _caches(system / "cpu" / "cpu0" / "cache"), nodes)


def numa_node(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a device such as "0000:1b:00.0" is attached to; None if the system does not say."""
    node = _text(devices / pci_address.lower() / "numa_node")
    return int(node) if node is not None and node.isdecimal() else None  # -1 says that there is none


def _caches(folder: Path) -> dict[str, int]:
    found = {}
    for index in sorted(folder.glob("index[0-9]*")):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size or "")
        if level is not None and match is not None and kind != "Instruction":
            found[level + ("d" if kind == "Data" else "")] = int(match[1]) * _UNITS[match[2]]
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
