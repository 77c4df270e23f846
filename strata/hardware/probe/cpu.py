"""The ceilings of a CPU, by all threads of this process and by one; the wall clock's, the median of several calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from strata.hardware.probe.ceiling import Ceiling, ProbeItem
from strata.hardware.probe.products import operands, product
from strata.hardware.probe.sustained import hold
from strata.hardware.telemetry import Summary

_MIN_CALLS = 3


@dataclass(frozen=True)
class CpuSizes:
    """What is measured. copied: bytes, far beyond the caches. squares: of products. rows: of products by a square
    weight of `width`. attended: tokens of a prompt. call: seconds for which one kind of call is repeated. held: seconds
    for which a product is.
    """

    copied: int = 256 << 20
    squares: tuple[int, ...] = (512, 1024, 2048)
    rows: tuple[int, ...] = (1, 16, 256)
    width: int = 2048
    attended: int = 1024
    call: float = 0.25
    held: float = 3.0


def probe_items(summaries: dict[str, Summary], sizes: CpuSizes | None = None) -> list[ProbeItem]:
    """In the order of their worth."""
    chosen = sizes or CpuSizes()
    return [
        ProbeItem("copy", partial(_memory, chosen)),
        *(ProbeItem(f"products in {dtype}", partial(_products, chosen, dtype)) for dtype in ("float32", "bfloat16")),
        ProbeItem("attention", partial(_attention, chosen)),
        ProbeItem("sustained product", partial(_held, chosen, summaries)),
    ]


def _memory(sizes: CpuSizes) -> Iterator[Ceiling]:
    source, target = torch.ones(2, sizes.copied // 4)
    for threads in sorted({torch.get_num_threads(), 1}, reverse=True):
        with _threads(threads):
            seconds = _seconds(partial(target.copy_, source), sizes.call)
            yield Ceiling("copy", 2 * source.nbytes / seconds, seconds, shape=(source.nbytes,), count=threads)
            seconds = _seconds(source.sum, sizes.call)
            yield Ceiling("read", source.nbytes / seconds, seconds, shape=(source.nbytes,), count=threads)


def _products(sizes: CpuSizes, dtype: str) -> Iterator[Ceiling]:
    device, threads = torch.device("cpu"), torch.get_num_threads()
    shapes = [(size, size, size, threads) for size in sizes.squares]
    shapes += [(rows, sizes.width, sizes.width, threads) for rows in sizes.rows]
    for rows, out, width, count in (*shapes, (*shapes[0][:3], 1)):
        x, weight = operands(dtype, rows, out, width, device)
        with _threads(count):
            seconds = _seconds(partial(product(dtype, device), x, weight), sizes.call)
        yield Ceiling("product", 2 * rows * out * width / seconds, seconds, dtype, (rows, out, width), count)


def _attention(sizes: CpuSizes) -> Iterator[Ceiling]:
    heads, head_size, tokens = 8, 64, sizes.attended
    shape = (1, heads, tokens, head_size)
    q, k, v = torch.randn(3, *shape)
    seconds = _seconds(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True), sizes.call)
    flops = 4 * heads * head_size * tokens * (tokens + 1) // 2
    yield Ceiling("attention", flops / seconds, seconds, "float32", shape, torch.get_num_threads())


def _held(sizes: CpuSizes, summaries: dict[str, Summary]) -> Iterator[Ceiling]:
    size, device = sizes.squares[-1], torch.device("cpu")
    x, weight = operands("float32", size, size, size, device)
    call = partial(product("float32", device), x, weight)
    return hold(call, size, sizes.held, summaries, dtype="float32", count=torch.get_num_threads())


def _seconds(call: Callable[[], object], least: float) -> float:
    """The median of calls that are repeated for at least so many seconds, after one that warms up."""
    call()
    found: list[float] = []
    while len(found) < _MIN_CALLS or sum(found) < least:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
