"""`strata bench kernels --tune`: which tile multiplies fastest by each weight and number of rows, or the library."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import TritonError

from benchmarks.kernels.products import DTYPE, Product, arguments
from strata.hardware.replay import time_replayed
from strata.kernels.linear.silu_mul import linear_silu_mul, one_after_the_other
from strata.kernels.linear.small_m import SmallMProduct, launch, multiply
from strata.kernels.linear.small_m_tiles import IMPLEMENTATION, MAX_ROWS, SmallMTile, candidates, variants
from strata.kernels.linear.tile_rule import LIBRARY_TOO
from strata.kernels.tuned import Key, TunedChoice

# The most rows that an entry of the table serves, as close together as the sizes of steps where padding costs most.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, MAX_ROWS)
LIBRARY = "cublas"
_FINALISTS = 2
_FIRST_REPEATS, _LAST_REPEATS = 3, 11
# A tile has to beat the library by more than measurements differ.
MIN_GAIN = 1.02
_MAX_COMPILERS = 16


@dataclass(frozen=True)
class Finding:
    """An entry of the table, and the product it is for."""

    product: Product
    key: Key
    choice: TunedChoice


def tune(products: Iterable[Product], buckets: Sequence[int] = BUCKETS) -> Iterator[tuple[Product, list[Finding]]]:
    """For each product the fastest of the candidates that are right, for each number of rows of the table.

    All candidates run a few times, and the variants of the best of them more often. What either round runs is compiled
    before it, in processes side by side, and once for all products that need it.
    """
    with ProcessPoolExecutor(
        min(_MAX_COMPILERS, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as processes:
        compilers = _Compilers(processes)
        for product in products:
            yield product, _tune_one(product, buckets, compilers)


def _tune_one(product: Product, buckets: Sequence[int], compilers: _Compilers) -> list[Finding]:
    early = torch.cuda.get_device_capability() >= (9, 0)
    first = {rows: candidates(product.operation, rows, product.out, product.width, early) for rows in buckets}
    compilers.compile(product, first)
    bench = _Bench(product)
    last = {}
    for rows in buckets:
        best = bench.fastest(rows, first[rows], _FIRST_REPEATS)[:_FINALISTS]
        last[rows] = [other for _, tile in best for other in variants(product.operation, tile)]
    compilers.compile(product, last)
    found = []
    for rows in buckets:
        choice = _choose(product, bench.fastest(rows, last[rows], _LAST_REPEATS), bench.library(rows))
        if choice is not None:
            key = Key(product.operation, str(DTYPE).removeprefix("torch."), product.out, product.width, rows)
            found.append(Finding(product, key, choice))
    return found


def _choose(product: Product, finals: Sequence[tuple[float, SmallMTile]], library: float) -> TunedChoice | None:
    """The winner, which must beat the library where that does the same work; None if nothing can run."""
    won = finals[0] if finals else None
    if product.operation in LIBRARY_TOO and (won is None or won[0] * MIN_GAIN > library):
        return TunedChoice(LIBRARY, {}, library, library)
    return None if won is None else TunedChoice(IMPLEMENTATION, asdict(won[1]), won[0], library)


class _Bench:
    """One product with weights that take turns, so that each call reads its own from memory."""

    def __init__(self, product: Product) -> None:
        torch.cuda.empty_cache()
        self._product, self._weights = product, product.weights()

    def library(self, rows: int) -> float:
        """Seconds of the library's product alone; with the gating, where the library's would be followed by it."""
        x = self._product.call(rows, self._weights[0]).x
        run = one_after_the_other if self._product.operation == linear_silu_mul.name else F.linear
        calls = [partial(run, x, weight) for weight in self._weights]
        return time_replayed(calls, repeats=_LAST_REPEATS, estimate=self._product.estimate(rows)).seconds

    def fastest(self, rows: int, tiles: Iterable[SmallMTile], repeats: int) -> list[tuple[float, SmallMTile]]:
        """Seconds of a call with each tile that is right, the fastest first."""
        call = self._product.call(rows, self._weights[0])
        exact = self._exact(call)
        found = []
        for tile in tiles:
            if self._is_right(call, tile, exact):
                calls = [partial(multiply, replace(call, weight=weight), tile) for weight in self._weights]
                timing = time_replayed(calls, repeats=repeats, estimate=self._product.estimate(rows))
                found.append((timing.seconds, tile))
        return sorted(found, key=lambda one: one[0])

    def _exact(self, call: SmallMProduct) -> Tensor:
        wide = (part.float() if isinstance(part, Tensor) else part for part in arguments(call))
        result = self._product.operator.reference(*wide)
        exact: Tensor = result[0] if isinstance(result, tuple) else result
        return exact

    def _is_right(self, call: SmallMProduct, tile: SmallMTile, exact: Tensor) -> bool:
        """Whether a tile can run and its result is right; if not, a line says why it is not used."""
        try:
            result = multiply(call, tile)[0]
        except (TritonError, ValueError) as error:
            print(f"{tile} cannot run: {str(error).splitlines()[0]}", file=sys.stderr)
            return False
        right = is_right(result, exact)
        if not right:
            print(f"{tile} is wrong for {self._product} with {len(call.x)} rows: not used", file=sys.stderr)
        return right


def is_right(result: Tensor, exact: Tensor) -> bool:
    """Whether a product in 16 bits is one rounding from the exact one, beside what sums in float32 lose."""
    allowed = exact.abs() * (1.1 * 2**-8) + exact.abs().max() * 1e-4
    return bool(((result.float() - exact).abs() <= allowed).all())


class _Compilers:
    """Fills Triton's cache on disk with kernels, each once as far as the arguments of calls tell them apart."""

    def __init__(self, processes: ProcessPoolExecutor) -> None:
        self._processes = processes
        self._compiled: set[tuple[object, ...]] = set()

    def compile(self, product: Product, tiles: Mapping[int, Sequence[SmallMTile]]) -> None:
        """The kernels that multiply by a product's weight, for each number of rows with its tiles."""
        different = {}
        for rows, some in tiles.items():
            call = product.call(rows, torch.empty(product.out, product.width, dtype=DTYPE, device="meta"))
            for tile in some:
                planned = launch(call, tile)
                kinds = tuple(argument is None for argument in planned.args)
                different[planned.kernel.__name__, kinds, str(planned.options)] = (product, rows, tile)
        new = {key: call for key, call in different.items() if key not in self._compiled}
        self._compiled.update(new)
        list(self._processes.map(_compile, new.values(), chunksize=4))


def _compile(what: tuple[Product, int, SmallMTile]) -> None:
    product, rows, tile = what
    weight = torch.empty(product.out, product.width, dtype=DTYPE, device="meta")
    with suppress(TritonError):  # what cannot run is named when its turn comes
        launch(product.call(rows, weight), tile).compile()
