"""`strata bench kernels --tune`: which of cuBLASLt's algorithms multiplies fastest, where F.linear's is not the one."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.products import DTYPE, Product
from benchmarks.kernels.tuning import LIBRARY, MIN_GAIN, Finding, is_right
from strata.hardware.replay import time_replayed
from strata.kernels.linear import cublaslt
from strata.kernels.linear.measured_algorithms import IMPLEMENTATION, MAX_ROWS, MeasuredAlgorithm, algorithms_of
from strata.kernels.linear.small_m_tiles import IMPLEMENTATION as TILE
from strata.kernels.tuned import Key, Table, TunedChoice, serving

# The sizes of recorded steps, close together where padding would cost most.
ROWS = (*range(64, 256, 16), *range(256, MAX_ROWS + 1, 32))
_PROPOSALS = 64
_FINALISTS = 4
_REPEATS, _ROUNDS = 3, 3

Calls = Sequence[Callable[[], object]]


def tune_algorithms(
    products: Sequence[Product], table: Table, known: Table, rows: Sequence[int] = ROWS
) -> Iterator[Finding]:
    """An algorithm for each product `linear` that may run by one, and number of rows, or that F.linear was as fast.

    Candidates are what the library proposes, what `known` has for the weight, and what was found for fewer rows. Where
    `table` has an entry that is as fast there is no finding; where a tile of more rows is, that is found.
    """
    version = cublaslt.version()
    if version is None:
        return
    for product in products:
        if product.operation != "linear":
            continue
        torch.cuda.empty_cache()
        weights = product.weights()
        if not cublaslt.supports(weights[0], weights[0]):
            continue
        candidates = list(_known(known, product, version))
        for count in rows:
            key = _key(product, count)
            choice = _fastest(product, weights, count, candidates, version)
            had = serving(table, key)
            if had is not None and key not in table and had.implementation != TILE:
                had = None  # of fewer rows the library may make more
            if had is None or had.seconds > MIN_GAIN * choice.seconds:
                yield Finding(product, key, choice)
            elif key not in table:
                yield Finding(product, key, had)
            if choice.implementation == IMPLEMENTATION:
                candidates = list(dict.fromkeys([*candidates, bytes.fromhex(choice.parameters["algorithm"])]))


def _known(table: Table, product: Product, version: int) -> Iterator[bytes]:
    for key, choice in table.items():
        if choice.implementation == IMPLEMENTATION and (key.out, key.width) == (product.out, product.width):
            measured = MeasuredAlgorithm(**choice.parameters)
            if measured.version == version:
                yield bytes.fromhex(measured.algorithm)


def calls_by_table(product: Product, x: Tensor, weights: Sequence[Tensor], table: Table) -> Calls | None:
    """The products of x [rows, width] with each weight by the algorithm in the table; None if it has none for them."""
    key = _key(product, len(x))
    algorithm = serving(algorithms_of(table, cublaslt.version()), key) if product.operation == "linear" else None
    result = torch.empty(len(x), product.out, dtype=DTYPE, device=x.device)
    return None if algorithm is None else _calls(algorithm, x, weights, result)


def _key(product: Product, rows: int) -> Key:
    return Key(product.operation, str(DTYPE).removeprefix("torch."), product.out, product.width, rows)


def _calls(algorithm: bytes, x: Tensor, weights: Sequence[Tensor], result: Tensor) -> Calls | None:
    """None if the library refuses the algorithm for them."""
    out, width = weights[0].shape
    prepared = cublaslt.product_by(algorithm, x.device, DTYPE, len(x), out, width)
    return None if prepared is None else [partial(prepared.run, x, weight, None, result) for weight in weights]


def _fastest(
    product: Product, weights: list[Tensor], rows: int, candidates: Sequence[bytes], version: int
) -> TunedChoice:
    x = product.call(rows, weights[0]).x
    shape = (x.device, DTYPE, rows, product.out, product.width)
    proposed = cublaslt.CublasLtProduct(*shape, product.width, product.width, False).proposals(_PROPOSALS)
    result = torch.empty(rows, product.out, dtype=DTYPE, device=x.device)
    exact = x.float() @ weights[0].float().t()

    def seconds(calls: Calls) -> float:
        return time_replayed(calls, repeats=_REPEATS, estimate=product.estimate(rows)).seconds

    timed: list[tuple[float, bytes, Calls]] = []
    for algorithm in dict.fromkeys([*proposed, *candidates]):
        calls = _calls(algorithm, x, weights, result)
        if calls is None:
            continue
        result.fill_(float("nan"))
        calls[0]()
        if is_right(result, exact):
            timed.append((seconds(calls), algorithm, calls))
        else:
            print(f"an algorithm is wrong for {product} with {rows} rows: {algorithm.hex()}", file=sys.stderr)
    finalists = sorted(timed, key=lambda one: one[0])[:_FINALISTS]
    library: Calls = [partial(F.linear, x, weight) for weight in weights]
    # In turns, so that clocks and heat are the same for all.
    rivals = [library, *(calls for _, _, calls in finalists)]
    rounds = [[seconds(calls) for calls in rivals] for _ in range(_ROUNDS)]
    first, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    best = min(range(len(others)), key=others.__getitem__, default=None)
    if best is None or others[best] * MIN_GAIN > first:
        return TunedChoice(LIBRARY, {}, first, first)
    parameters = {"version": version, "algorithm": finalists[best][1].hex()}
    return TunedChoice(IMPLEMENTATION, parameters, others[best], first)
