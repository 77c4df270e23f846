"""What a cold start compiles: CPU seconds of every kernel, and how long so many processes take for all of them.

Usage: python benchmarks/kernels_ahead.py 0.6B [--device h200] [--processes 15]

Needs Triton and no GPU. One process derives the variants and compiles them one after the other into an empty cache, so
that its CPU time, which others on the machine do not lengthen much, is what each takes; launchers, which gcc compiles
where CUDA's driver is, are not counted. Prints a JSON object for each kernel, most seconds first, then one of all: the
longest compile, and when the last would be done if each process took the next variant whenever it is done with one, in
the order of a start, counted from the beginning of the derivation.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PROCESSES = 15


@dataclass(frozen=True)
class Job:
    """A variant to compile. noted: when it is known (s); seconds: what it takes; soon: it goes before others."""

    kernel: str
    noted: float
    seconds: float
    soon: bool


def makespan(jobs: Iterable[Job], processes: int) -> float:
    """When the last is done. Each process takes the next of those that are noted, those first that are due soon."""
    coming = sorted(jobs, key=lambda job: job.noted)[::-1]
    free, waiting, end = [0.0] * processes, [], 0.0
    while coming or waiting:
        now = heapq.heappop(free)
        if not waiting:
            now = max(now, coming[-1].noted)
        while coming and coming[-1].noted <= now:
            job = coming.pop()
            heapq.heappush(waiting, (not job.soon, job.noted, -len(coming), job.seconds))
        done = now + heapq.heappop(waiting)[-1]
        heapq.heappush(free, done)
        end = max(end, done)
    return end


def measured(model: str, on: str) -> list[Job]:
    """What such a start compiles on such a device, in the order in which it is noted. Compiles all of it."""
    from strata.engine.ahead.derive import note_variants, target_of
    from strata.engine.ahead.worker import SLOW
    from strata.engine.engine_config import EngineConfig
    from strata.hardware.specs import device
    from strata.kernels.compiling.noting import Variant
    from strata.kernels.device_limits import DeviceLimits

    known = device(on)
    limits = DeviceLimits.listed(known)
    noted: list[tuple[Variant, float]] = []
    began = cpu_seconds()
    asked = EngineConfig.from_options(model, {"load_format": "dummy", "skip_tokenizer_init": True})
    note_variants(asked, limits, lambda variant: noted.append((variant, cpu_seconds() - began)))
    jobs = []
    for variant, when in noted:
        before = cpu_seconds()
        variant.compile(target_of(limits))
        jobs.append(Job(variant.kernel, when, cpu_seconds() - before, variant.kernel in SLOW))
    return jobs


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for, such as ptxas."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def report(model: str, jobs: list[Job], processes: int) -> list[dict[str, Any]]:
    """An object for each kernel, and one of all."""
    kernels = defaultdict(list)
    for job in jobs:
        kernels[job.kernel].append(job.seconds)
    rows: list[dict[str, Any]] = [
        {"kernel": name, "variants": len(some), "cpu_s": round(sum(some), 2), "longest_s": round(max(some), 2)}
        for name, some in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]
    seconds = [job.seconds for job in jobs]
    whole = {"variants": len(jobs), "cpu_s": round(sum(seconds), 1), "longest_s": round(max(seconds), 2)}
    derivation = {"first_noted_s": round(jobs[0].noted, 2), "last_noted_s": round(jobs[-1].noted, 2)}
    last = {"processes": processes, "done_s": round(makespan(jobs, processes), 2)}
    return [*rows, {"model": model, **whole, **derivation, **last}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a shape, such as 0.6B, or a checkpoint folder")
    parser.add_argument("--device", default="h200", help="of the device database")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that compile, of a start on one core more")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "cache")
        tempfile.tempdir = folder  # where the spare cache is
        for row in report(asked.model, measured(asked.model, asked.device), asked.processes):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
