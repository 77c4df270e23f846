"""Honest timing: warmed up, repeated, the median, and with cold caches where the work will find them cold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# The buffer that is written between runs holds this many times the L2 cache, so that nothing of a run is left in it.
FLUSH_FACTOR = 2


@dataclass(frozen=True)
class Timing:
    """Every run of a measurement, in seconds."""

    runs: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.runs)


def time_cuda(run: Callable[[], object], *, repeats: int = 20, warmup: int = 3, cold: bool = True) -> Timing:
    """Time `run` on the current CUDA device with events; only what it enqueues on the current stream counts.

    cold: write over the L2 cache before every run. The device is busy with that while the host enqueues the run, so
    the gaps of slow launches do not count either; without it they may.
    """
    device = torch.cuda.current_device()
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(FLUSH_FACTOR * cache if cold else 0, dtype=torch.int8, device=device)
    for _ in range(warmup):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return Timing(tuple(start.elapsed_time(end) / 1e3 for start, end in pairs))


def time_cpu(run: Callable[[], object], *, repeats: int = 20, warmup: int = 3) -> Timing:
    """Time `run` on the host by the wall clock; caches are as the run before left them."""
    for _ in range(warmup):
        run()
    runs = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        runs.append(time.perf_counter() - start)
    return Timing(tuple(runs))
