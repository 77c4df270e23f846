"""Times of collectives on the ranks that run them, beside the alpha-beta model of their link."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.bench.result import short_dtype
from strata.comm.collectives import start_all_reduce
from strata.comm.cost import CollectiveCost, all_gather_cost, all_reduce_cost, all_to_all_cost, reduce_scatter_cost
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import all_gather, all_reduce, all_to_all, reduce_scatter
from strata.comm.symmetric import with_symmetric_memory
from strata.hardware.links import Link, link_of
from strata.hardware.machine import cpu_name
from strata.hardware.probe.ceiling import Ceiling, ProbeItem
from strata.hardware.replay import time_replayed
from strata.hardware.specs import recognize
from strata.kernels.op import Implementation, Operation

# Of each collective: what it is, what it is called with besides the axis, and what a rank sends of so many bytes.
COLLECTIVES: dict[str, tuple[Operation, tuple[int, ...], Callable[[int, int], CollectiveCost]]] = {
    "all_reduce": (all_reduce, (), all_reduce_cost),
    "all_gather": (all_gather, (1,), all_gather_cost),
    "reduce_scatter": (reduce_scatter, (0,), reduce_scatter_cost),
    "all_to_all": (all_to_all, (), all_to_all_cost),
}
_WARM_UP = 3
SIZES = "8KiB,256KiB,8MiB,128MiB"
# Ranks import torch and connect before they measure.
_START_SECONDS = 12.0


@dataclass(frozen=True)
class MeasureRequest:
    """operations: of `COLLECTIVES`. sizes: bytes of what each rank hands in, of an all-gather of what it gets."""

    operations: list[str]
    sizes: list[int]
    dtype: str
    repeat: int


@dataclass(frozen=True)
class CommResult:
    """One collective of one size. value: the median of `all`, in us, on the slowest rank; a call in a CUDA graph on
    GPUs, from the host's call to its end on CPUs. model: a library's call on the link; floor: the messages alone; None
    where the link is not known. sent: bytes that a rank sends at least.
    """

    test: str
    operation: str
    algorithm: str
    ranks: int
    bytes: int
    sent: int
    dtype: str
    value: float
    unit: str
    all: list[float]
    model: float | None
    floor: float | None
    device: str

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        known = "" if self.model is None else f"; a library by the model {self.model:.1f}, floor {self.floor:.2f}"
        rate = f"{self.sent / self.value / 1e3:.3g} GB/s sent"
        what = f"{self.operation} of {_size(self.bytes)} over {self.ranks} ranks, {self.algorithm}"
        return f"{what}: {self.value:.4g} us{known}; {rate}"


def measure(world: World, asked: MeasureRequest) -> Iterator[CommResult]:
    """Every operation by every implementation that takes it, smallest sizes first. All ranks call this."""
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    name, link = cpu_name(), None
    if world.device.type == "cuda":
        axis = with_symmetric_memory(axis, world.device)
        name = torch.cuda.get_device_name(world.device)
        known = recognize(name)
        link = None if known is None else link_of(known)
    for operation in asked.operations:
        for size in sorted(asked.sizes):
            yield from _measured(operation, size, asked, axis, world.device, name, link)


def _measured(
    name: str, size: int, asked: MeasureRequest, axis: Axis, device: torch.device, device_name: str, link: Link | None
) -> Iterator[CommResult]:
    operation, more, counts = COLLECTIVES[name]
    x = _input(name, size, getattr(torch, asked.dtype), axis, device)
    sends = counts(size, axis.size)
    for one in _implementations(operation, x, axis, *more):
        _check(name, one, x, axis, more)
        seconds = _seconds(partial(one.run, x, axis, *more), device, asked.repeat)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        taken = [1e6 * value for value in start_all_reduce(slowest, axis, "max").wait().tolist()]
        model = floor = None
        if link is not None:
            model, floor = 1e6 * link.seconds(sends.messages, sends.bytes), 1e6 * link.min_seconds(1, sends.bytes)
        yield CommResult(
            "comm", name, one.name, axis.size, size, sends.bytes, short_dtype(asked.dtype),
            statistics.median(taken), "us", taken, model, floor, device_name,
        )  # fmt: skip


def _input(name: str, size: int, dtype: torch.dtype, axis: Axis, device: torch.device) -> Tensor:
    """Rows, one for each rank, or the rank's own part of what is gathered, all of the number of the rank, from 1."""
    columns = size // dtype.itemsize // axis.size
    if columns < 1 or columns * dtype.itemsize * axis.size != size:
        raise ValueError(
            f"{size} bytes are no {axis.size} equal parts of {short_dtype(str(dtype).removeprefix('torch.'))} numbers; "
            f"give multiples of {dtype.itemsize * axis.size}"
        )
    rows = 1 if name == "all_gather" else axis.size
    return torch.full((rows, columns), axis.index + 1, dtype=dtype, device=device)


def _implementations(operation: Operation, x: Tensor, axis: Axis, *more: int) -> list[Implementation]:
    """Each by its name once, in order of preference; those of deterministic mode too."""
    kind = x.device.type
    listed = [*operation.bind(kind).candidates, *operation.bind(kind, deterministic=True).candidates]
    fitting = {one.name: one for one in listed if one.supports is None or one.supports(x, axis, *more)}
    fitting.pop("reference", None)  # nothing chooses it
    return list(fitting.values())


def _check(name: str, one: Implementation, x: Tensor, axis: Axis, more: tuple[int, ...]) -> None:
    """Raises RuntimeError if the result is not that of ranks' numbers: a quick way to a wrong result is no result."""
    found = one.run(x, axis, *more)
    numbers = torch.arange(1, axis.size + 1, device=x.device, dtype=x.dtype)
    if name in ("all_reduce", "reduce_scatter"):
        right = (found == numbers.sum()).all()
    else:
        right = (found.view(axis.size, -1) == numbers[:, None]).all()
    if not bool(right):
        raise RuntimeError(f"{name} by {one.name} of {x.nbytes} bytes gives wrong numbers on rank {axis.index}")


def _seconds(call: Callable[[], object], device: torch.device, repeat: int) -> list[float]:
    if device.type == "cuda":
        return list(time_replayed([call], repeats=repeat, estimate=20e-6).runs)
    found = []
    for _ in range(_WARM_UP + repeat):  # each call waits for the other ranks, so they begin the next together
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found[_WARM_UP:]


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"


def group_sizes(gpus: int) -> list[int]:
    """All, and then halves down to two."""
    sizes = [gpus]
    while sizes[-1] % 2 == 0 and sizes[-1] > 2:
        sizes.append(sizes[-1] // 2)
    return sizes


def probe_items(gpus: int, end: float, sizes: str = SIZES, device: str = "cuda") -> list[ProbeItem]:
    """Of each group size, one part; `end`: when the time is over, by `time.perf_counter`."""

    def part(ranks: int) -> ProbeItem:
        return ProbeItem(f"collectives over {ranks}", lambda: _measure(ranks, end, sizes, device))

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
