"""The ceilings of one GPU: calls in CUDA graphs over operands that are not in its cache, so that no launch counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from strata.hardware.nvml import NvmlDevice
from strata.hardware.probe.ceiling import Ceiling, ProbeItem
from strata.hardware.probe.products import operands, precision, product
from strata.hardware.probe.sustained import hold
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.hardware.telemetry import Summary

_COPIED = (64 << 20, 256 << 20, 1 << 30)
_SQUARES = (1024, 2048, 4096, 8192)
# Rows of a decode step and of prompts, by a weight of the size that models have.
_ROWS = (1, 16, 64, 256, 1024, 4096)
_WEIGHTS = ((4096, 4096), (28672, 4096))
_BY_ROWS = ("bfloat16", "float8")
_ATTENDED = (1024, 4096, 16384)
_ATTENDED_TOKENS, _HEADS, _HEAD_SIZE = 16384, 32, 128
_HOST_BYTES = 256 << 20
_SUSTAINED = ("bfloat16", 8192)
# About what a device reaches: only for how often to repeat a call.
_BYTES_PER_SECOND, _FLOPS_PER_SECOND = 3e12, 5e14


def probe_items(
    device: torch.device, telemetry: NvmlDevice | None, held: float, summaries: dict[str, Summary]
) -> list[ProbeItem]:
    """In the order of their worth. held: seconds of the product that is held under the power limit; summaries: get
    what the device told meanwhile."""
    dtypes = _dtypes(device)
    return [
        ProbeItem("copy", partial(_copies, device)),
        ProbeItem("read", partial(_reads, device)),
        ProbeItem("launch", partial(_launches, device)),
        ProbeItem("host copies", partial(_host_copies, device)),
        *(ProbeItem(f"products in {dtype}", partial(_products, device, dtype)) for dtype in dtypes),
        ProbeItem("attention", partial(_attention, device)),
        ProbeItem("sustained product", partial(_held, device, held, telemetry, summaries)),
    ]


def _dtypes(device: torch.device) -> list[str]:
    dtypes = ["bfloat16", "float16", "int8", "tf32", "float32"]
    if torch.cuda.get_device_capability(device) >= (8, 9):
        dtypes.insert(1, "float8")
    return dtypes


def _copies(device: torch.device) -> Iterator[Ceiling]:
    for nbytes in _COPIED:
        source, target = torch.ones(2, nbytes, dtype=torch.uint8, device=device)
        seconds = time_replayed([partial(target.copy_, source)], estimate=2 * nbytes / _BYTES_PER_SECOND).seconds
        yield Ceiling("copy", 2 * nbytes / seconds, seconds, shape=(nbytes,))


def _reads(device: torch.device) -> Iterator[Ceiling]:
    """The largest number, and the sum: what reads most by a reduction of torch's."""
    for nbytes in _COPIED:
        found = []
        for dtype, name in ((torch.int16, "amax"), (torch.float32, "sum")):
            x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
            call: Callable[[], Tensor] = partial(getattr(torch, name), x, 0)
            found.append(time_replayed([call], estimate=nbytes / _BYTES_PER_SECOND).seconds)
        yield Ceiling("read", nbytes / min(found), min(found), shape=(nbytes,))


def _products(device: torch.device, dtype: str) -> Iterator[Ceiling]:
    shapes = [(size, size, size) for size in _SQUARES]
    if dtype in _BY_ROWS:
        shapes += [(rows, out, width) for out, width in _WEIGHTS for rows in _ROWS]
    multiply = product(dtype, device)
    for rows, out, width in shapes:
        first = operands(dtype, rows, out, width, device)
        nbytes, flops = sum(one.nbytes for one in first), 2 * rows * out * width
        pairs = [first, *(operands(dtype, rows, out, width, device) for _ in range(copies_beyond_l2(nbytes) - 1))]
        estimate = max(flops / _FLOPS_PER_SECOND, nbytes / _BYTES_PER_SECOND)
        try:
            with precision(dtype):
                seconds = time_replayed([partial(multiply, *pair) for pair in pairs], estimate=estimate).seconds
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            continue  # a library has no kernel for so few rows
        yield Ceiling("product", flops / seconds, seconds, dtype, (rows, out, width))


def _attention(device: torch.device) -> Iterator[Ceiling]:
    for tokens in _ATTENDED:
        sequences = _ATTENDED_TOKENS // tokens
        shape = (sequences, _HEADS, tokens, _HEAD_SIZE)
        q, k, v = torch.randn(3, *shape, dtype=torch.bfloat16, device=device)
        flops = 4 * sequences * _HEADS * _HEAD_SIZE * tokens * (tokens + 1) // 2
        found: dict[str, float] = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
                    found[backend.name.lower()] = time_replayed([call], estimate=flops / _FLOPS_PER_SECOND).seconds
            except RuntimeError:
                continue  # a build without it, or a device that it does not support
        if not found:
            raise RuntimeError("torch has neither cuDNN's nor flash attention for this device")
        best = min(found, key=found.__getitem__)
        yield Ceiling("attention", flops / found[best], found[best], "bfloat16", shape, algorithm=best)


def _launches(device: torch.device) -> Iterator[Ceiling]:
    x = torch.zeros(32, device=device)
    call = partial(x.add_, 1)
    seconds = _per_call(call, device)
    yield Ceiling("launch", seconds, seconds)
    seconds = time_replayed([call]).seconds
    yield Ceiling("kernel in a graph", seconds, seconds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    seconds = _per_call(graph.replay, device)
    yield Ceiling("graph launch", seconds, seconds)


def _per_call(call: Callable[[], object], device: torch.device, count: int = 1000) -> float:
    """Seconds of one of many calls, one behind the other, from the host's first to the device's last."""
    found = []
    for _ in range(4):  # the first warms up
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found[1:])


def _host_copies(device: torch.device) -> Iterator[Ceiling]:
    there = torch.empty(_HOST_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    for quantity, target, source in (("host to device", there, here), ("device to host", here, there)):
        seconds = _per_call(partial(target.copy_, source, non_blocking=True), device, 4)
        yield Ceiling(quantity, _HOST_BYTES / seconds, seconds, shape=(_HOST_BYTES,))


def _held(
    device: torch.device, seconds: float, telemetry: NvmlDevice | None, summaries: dict[str, Summary]
) -> Iterator[Ceiling]:
    dtype, size = _SUSTAINED
    call = partial(product(dtype, device), *operands(dtype, size, size, size, device))
    wait = partial(torch.cuda.synchronize, device)
    return hold(call, size, seconds, summaries, dtype=dtype, wait=wait, batch=8, telemetry=telemetry)
