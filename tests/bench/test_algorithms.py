"""Tuning of cuBLASLt's algorithms, against a library and a clock that are stand-ins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from strata.bench.kernels import algorithms
from strata.bench.kernels.algorithms import calls_by_table, tune_algorithms
from strata.bench.kernels.products import Product
from strata.kernels.linear import cublaslt
from strata.kernels.tuned import Choice, Key
from tests.kernels.linear.column_library import ColumnLibrary

OUT, WIDTH, VERSION = 24, 40, 130100
PRODUCT = Product("tiny", "o", "linear", OUT, WIDTH)


def proposal(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(56)


def key(rows: int) -> Key:
    return Key("linear", "bfloat16", OUT, WIDTH, rows)


def measured(algorithm: bytes, seconds: float = 1e-6, version: int = VERSION) -> Choice:
    return Choice("cublaslt", {"version": version, "algorithm": algorithm.hex()}, seconds, 1e-3)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ColumnLibrary]:
    """Proposes the algorithms 1, 2 and 3."""
    fake = ColumnLibrary()
    fake.algorithms = 3
    monkeypatch.setattr(cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "supports", lambda x, weight: True)
    monkeypatch.setattr(Product, "weights", lambda self: [torch.randn(OUT, WIDTH).bfloat16() for _ in range(2)])
    cublaslt.product_by.cache_clear()
    yield fake
    cublaslt.product_by.cache_clear()


def clock(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary, times: dict[bytes | None, float]) -> set[Any]:
    """Seconds by algorithm (None: F.linear); returns what has been timed."""
    timed = set()

    def time_replayed(calls: Sequence[Callable[[], Tensor]], **_: object) -> SimpleNamespace:
        assert len(calls) == 2, "weights that take turns"
        first = calls[0]
        algorithm = None
        if not (isinstance(first, partial) and first.func is F.linear):
            first()
            algorithm = library.multiplied_by[-1]
        timed.add(algorithm)
        return SimpleNamespace(seconds=times[algorithm])

    monkeypatch.setattr(algorithms, "time_replayed", time_replayed)
    return timed


def tuned(table: dict[Key, Choice], known: dict[Key, Choice], rows: Sequence[int] = (96,)) -> dict[int, Choice]:
    return {found.key.rows: found.choice for found in tune_algorithms([PRODUCT], table, known, rows)}


TIMES = {None: 10.0, proposal(1): 10.0, proposal(2): 8.0, proposal(3): 9.0, proposal(7): 7.0}


def test_the_fastest_is_kept_with_its_version(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    timed = clock(monkeypatch, library, TIMES)
    assert tuned({}, {}) == {96: Choice("cublaslt", {"version": VERSION, "algorithm": proposal(2).hex()}, 8.0, 10.0)}
    assert timed == {None, *map(proposal, (1, 2, 3))}


def test_what_was_known_is_a_candidate_in_its_version(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    clock(monkeypatch, library, TIMES)
    known = {key(128): measured(proposal(7))}
    assert tuned({}, known)[96].parameters["algorithm"] == proposal(7).hex()
    stale = {key(128): measured(proposal(7), version=VERSION - 1)}
    assert tuned({}, stale)[96].parameters["algorithm"] == proposal(2).hex()


def test_less_than_two_percent_is_no_gain(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    clock(monkeypatch, library, TIMES | {proposal(2): 9.9, proposal(3): 9.85})
    assert tuned({}, {}) == {96: Choice("cublas", {}, 10.0, 10.0)}


def test_what_the_table_has_stays_unless_it_is_slower(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    clock(monkeypatch, library, TIMES)
    tile = Choice("skinny", {}, 8.1, 10.0)
    assert tuned({key(96): tile, key(128): Choice("skinny", {}, 9.0, 10.0)}, {}, (96, 128)).keys() == {128}


def test_a_tile_of_more_rows_stays_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary) -> None:
    """Fewer rows take it no longer; an entry for them would hide it otherwise."""
    clock(monkeypatch, library, TIMES)
    fast, slow, other = Choice("skinny", {}, 8.1, 10.0), Choice("skinny", {}, 9.0, 10.0), Choice("cublas", {}, 8.1, 8.1)
    assert tuned({key(96): fast}, {}, (80,)) == {80: fast}
    assert tuned({key(96): slow}, {}, (80,))[80].implementation == "cublaslt"
    assert tuned({key(96): other}, {}, (80,))[80].implementation == "cublaslt", "the library may choose worse for fewer"


def test_a_weight_that_no_algorithm_would_serve_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary
) -> None:
    """A small one, one of odd sizes, or any on another device: an entry would stand in the way of a tile."""
    timed = clock(monkeypatch, library, TIMES)
    monkeypatch.setattr(cublaslt, "supports", lambda x, weight: weight.shape != (OUT, WIDTH))
    assert tuned({key(96): Choice("skinny", {}, 9.0, 10.0)}, {}) == {}
    assert not timed


def test_one_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, library: ColumnLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, library, TIMES)
    right = library.cublasLtMatmul

    def wrong(*arguments: Any) -> int:
        return 0 if bytes(arguments[12]) == proposal(2) else right(*arguments)

    monkeypatch.setattr(library, "cublasLtMatmul", wrong)
    assert tuned({}, {})[96].parameters["algorithm"] == proposal(3).hex()
    assert proposal(2).hex() in capsys.readouterr().err


def test_calls_are_by_the_algorithm_in_the_table(library: ColumnLibrary) -> None:
    weights, x = PRODUCT.weights(), torch.randn(90, WIDTH).bfloat16()
    calls = calls_by_table(PRODUCT, x, weights, {key(96): measured(proposal(7))})
    assert calls is not None
    for call in calls:
        call()
    assert library.multiplied_by == [proposal(7)] * 2
    assert calls_by_table(PRODUCT, x, weights, {key(96): Choice("cublas", {}, 1.0, 1.0)}) is None
    assert calls_by_table(PRODUCT, x[:40], weights, {key(96): measured(proposal(7))}) is None
