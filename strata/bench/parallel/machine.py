"""What this machine has for ranks."""

from __future__ import annotations

import os

import torch

from strata.bench.parallel.plan import Machine
from strata.hardware.gpu_memory import GpuMemories


def this_machine(device: str, ranks: int | None) -> Machine:
    """device: auto, cpu or cuda. ranks: as many as are asked for; None: all GPUs, or two processes on a CPU.

    No GPU gets a context: it would take memory of those that are measured. Raises ValueError for a device that is
    unknown or not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown; give auto, cpu or cuda")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; --device cpu measures processes")
    if gpus:
        memories = [memory.total for memory in GpuMemories.of_this_process().read()]
        return Machine("cuda", gpus, min(memories) if len(memories) == gpus else None)
    return Machine("cpu", ranks or 2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device == "auto")
