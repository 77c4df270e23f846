"""Collectives as ceilings of a machine: `strata bench comm` over all GPUs, then over groups of half as many."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from strata.hardware.probe.ceiling import Ceiling, Part

SIZES = "8KiB,256KiB,8MiB,128MiB"
# Ranks import torch and connect before they measure.
_START_SECONDS = 12.0


def group_sizes(gpus: int) -> list[int]:
    """All, and then halves down to two."""
    sizes = [gpus]
    while sizes[-1] % 2 == 0 and sizes[-1] > 2:
        sizes.append(sizes[-1] // 2)
    return sizes


def parts(gpus: int, end: float, sizes: str = SIZES, device: str = "cuda") -> list[Part]:
    """Of each group size, one part; `end`: when the time is over, by `time.perf_counter`."""

    def part(ranks: int) -> Part:
        return Part(f"collectives over {ranks}", lambda: _measure(ranks, end, sizes, device))

    return [part(ranks) for ranks in group_sizes(gpus)]


def _measure(ranks: int, end: float, sizes: str, device: str) -> Iterator[Ceiling]:
    left = end - time.perf_counter()
    if left < _START_SECONDS:
        raise RuntimeError(f"{left:.0f} s are left, and ranks need {_START_SECONDS:.0f} s to start")
    command = [sys.executable, "-m", "strata", "bench", "comm", "--json", "--repeat", "5", "--sizes", sizes]
    command += ["--ranks", str(ranks), "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done within the {left:.0f} s that were left") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"it ended with code {done.returncode}")
    for line in done.stdout.splitlines():
        one = json.loads(line)
        seconds = one["value"] / 1e6
        yield Ceiling(one["operation"], seconds, seconds, "bfloat16", (one["bytes"],), ranks, one["algorithm"])
