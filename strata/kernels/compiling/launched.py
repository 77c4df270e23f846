"""Which kernels a call launches, and what each takes of a device, from what the compiler made of it."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget

from strata.hardware.figures import Cuda
from strata.kernels.compiling.noting import NotLaunched, noting
from strata.kernels.device_limits import DeviceLimits, meta_means

# Of CUDA's programming guide, "Technical specifications per compute capability", and the occupancy calculator of Nsight
# Compute: alike from Ampere to Blackwell.
_WARP = 32
_REGISTERS, _REGISTERS_AT_ONCE, _WARPS_AT_ONCE = 1 << 16, 256, 4  # registers are given to warps, warps to quarters
_SHARED_AT_ONCE, _SHARED_OF_SYSTEM = 128, 1024  # shared bytes are given to blocks, each with some for the system


@dataclass(frozen=True)
class Occupancy:
    """resident: thread blocks on a multiprocessor at once. warps: the share of its warps that these are. limit: what
    allows no more: "registers", "shared memory", "threads" or "blocks". waves: how often the blocks that all
    multiprocessors hold are the blocks of a launch.
    """

    resident: int
    warps: float
    limit: str
    waves: float


@dataclass(frozen=True)
class LaunchedKernel:
    """name: of the kernel. registers: of a thread. shared_bytes, warps: of a block, of which `blocks` were launched."""

    name: str
    registers: int
    shared_bytes: int
    warps: int
    blocks: int
    occupancy: Occupancy

    def sentence(self) -> str:
        found = self.occupancy
        return f"{self.registers} registers, {found.resident} at once ({found.limit}), {found.waves:.2f} waves"


def launched(call: Callable[[], object], cuda: Cuda) -> list[LaunchedKernel]:
    """The kernels of Triton that a call launches on such a device, in order; of libraries nothing is known."""
    call()  # what is compiled now, or noted, is launched or counted the second time
    return [_launched(kernel, grid, cuda) for kernel, grid in _grids(call)]


def launched_elsewhere(call: Callable[[], object], limits: DeviceLimits, cuda: Cuda) -> list[LaunchedKernel]:
    """The same of a call with tensors on the meta device, which stand for those of a device that is not here. Each
    kernel is compiled for it, in a second or more."""
    with noting(_target(cuda), lambda _: None), meta_means(limits), torch.inference_mode():
        return launched(call, cuda)


def _target(cuda: Cuda) -> GPUTarget:
    major, minor = cuda.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def _grids(call: Callable[[], object]) -> list[tuple[Any, tuple[int, ...]]]:
    """What each launch runs, and how many blocks along each dimension."""
    found: list[tuple[Any, tuple[int, ...]]] = []
    run = JITFunction.run

    def seen(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def known(bound: dict[str, Any]) -> tuple[int, ...]:
            dimensions: tuple[int, ...] = grid(bound) if callable(grid) else grid
            found.append((None, dimensions))
            return dimensions

        kernel = run(self, *args, grid=known, warmup=warmup, **options)
        found[-1] = kernel, found[-1][1]
        return kernel

    def passing(*_: object) -> None:
        """There is a hook, so that no kernel is launched past Triton (`strata.kernels.cached_launch`)."""

    JITFunction.run = seen
    knobs.runtime.launch_enter_hook.add(passing)
    try:
        call()
    finally:
        knobs.runtime.launch_enter_hook.remove(passing)
        JITFunction.run = run
    return found


def _launched(kernel: Any, grid: tuple[int, ...], cuda: Cuda) -> LaunchedKernel:
    compiled = kernel.variant.compile(_target(cuda)) if isinstance(kernel, NotLaunched) else kernel
    registers, blocks = resource_usage(compiled.asm["cubin"])["REG"], math.prod(grid)
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    found = occupancy(cuda, registers, shared, warps, blocks)
    return LaunchedKernel(compiled.metadata.name, registers, shared, warps, blocks, found)


def occupancy(cuda: Cuda, registers: int, shared_bytes: int, warps: int, blocks: int) -> Occupancy:
    """Of a kernel with so many registers a thread, shared bytes and warps a block, of which `blocks` are launched.

    Raises ValueError if not one block fits.
    """
    of_warp = math.ceil(max(1, registers) * _WARP / _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    held = _REGISTERS // of_warp // _WARPS_AT_ONCE * _WARPS_AT_ONCE
    of_block = math.ceil((shared_bytes + _SHARED_OF_SYSTEM) / _SHARED_AT_ONCE) * _SHARED_AT_ONCE
    limits = {
        "blocks": cuda.blocks,
        "threads": cuda.threads // (warps * _WARP),
        "registers": held // warps,
        "shared memory": (cuda.shared_bytes + _SHARED_OF_SYSTEM) // of_block,
    }
    limit = min(limits, key=lambda name: limits[name])
    resident = limits[limit]
    if not resident:
        raise ValueError(f"no block of {warps} warps with {registers} registers and {shared_bytes} shared bytes fits")
    return Occupancy(resident, resident * warps * _WARP / cuda.threads, limit, blocks / (resident * cuda.processors))


@lru_cache(maxsize=256)
def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, of a thread; STACK and LOCAL, bytes that it spills: by CUDA's own tool, which comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
