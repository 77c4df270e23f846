"""Which calls of the dense layer a table's algorithms serve, and that they reach the library as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strata.kernels
from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits, as_if_on
from strata.kernels.linear import cublaslt, measured_algorithms
from strata.kernels.linear.linear import linear
from strata.kernels.linear.measured_algorithms import MOST_ROWS, algorithms_of, measured_linear, supports
from strata.kernels.tuned import Choice, Key
from tests.kernels.linear.column_library import ColumnLibrary

VERSION = 130100
OUT, WIDTH = 1024, 1032
TABLES = Path(strata.kernels.__file__).parent / "tuned"


def algorithm(rows: int) -> bytes:
    return rows.to_bytes(8, "little") * 8


def choice(rows: int, version: int = VERSION) -> Choice:
    return Choice("cublaslt", {"version": version, "algorithm": algorithm(rows).hex()}, 1e-5, 2e-5)


def key(rows: int, out: int = OUT) -> Key:
    return Key("linear", "bfloat16", out, WIDTH, rows)


TABLE = {
    key(64): Choice("skinny", {"kernel": "dot", "columns": 64, "width": 8, "warps": 4}, 1e-5, 2e-5),
    key(96): choice(96),
    key(160): Choice("cublas", {}, 1e-5, 1e-5),
    key(192): choice(192),
    key(1024): choice(1024),
    key(2048): choice(2048),
}


@pytest.fixture
def device(library: ColumnLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[ColumnLibrary]:
    """A device with that table, whose library is the stand-in."""

    def algorithms(_: torch.device) -> measured_algorithms.Algorithms:
        return algorithms_of(TABLE, cublaslt.version())

    monkeypatch.setattr(measured_algorithms, "_device_algorithms", algorithms)
    measured_algorithms._product.cache_clear()
    yield library
    measured_algorithms._product.cache_clear()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def served(rows: int) -> bytes | None:
    return tuned.serving(algorithms_of(TABLE, VERSION), key(rows))


def test_rows_take_the_algorithm_of_the_next_larger_number_that_was_measured() -> None:
    found = {rows: served(rows) for rows in range(1, 2049)}
    wanted = {96: range(65, 97), 192: range(161, 193), 1024: range(513, 1025), 2048: range(1025, 2049)}
    expected = {rows: algorithm(edge) for edge, among in wanted.items() for rows in among}
    assert {rows: one for rows, one in found.items() if one is not None} == expected


def test_it_reaches_the_library_as_it_is_stored(device: ColumnLibrary) -> None:
    weight = draw(OUT, WIDTH)
    for rows, edge in ((96, 96), (70, 96), (180, 192)):
        x = draw(rows, WIDTH)
        assert supports(x, weight)
        result = measured_linear(x, weight)
        assert device.multiplied_by[-1] == algorithm(edge)
        exact = F.linear(x.double(), weight.double())
        torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=1e-3)
        assert measured_linear(x.view(2, rows // 2, WIDTH), weight).shape == (2, rows // 2, OUT)


def test_each_shape_is_prepared_once(device: ColumnLibrary) -> None:
    weight, x = draw(OUT, WIDTH), draw(96, WIDTH)
    for _ in range(3):
        assert supports(x, weight)
        measured_linear(x, weight)
    assert cublaslt.product_by.cache_info().misses == 1


def test_what_was_not_measured_is_left_to_others(device: ColumnLibrary) -> None:
    weight, x = draw(OUT, WIDTH), draw(96, WIDTH)
    assert supports(x, weight)
    assert not supports(draw(64, WIDTH), weight), "a tile is faster"
    assert not supports(draw(130, WIDTH), weight), "F.linear is"
    assert not supports(draw(256, WIDTH), weight), "rows of which nothing is known"
    assert not supports(draw(0, WIDTH), weight)
    assert not supports(draw(MOST_ROWS + 1, WIDTH), weight)
    assert not supports(x, weight, draw(OUT)), "a bias"
    assert not supports(x.half(), weight.half())
    assert not supports(x, draw(OUT + 8, WIDTH)), "another weight"
    assert not supports(draw(WIDTH, 96).t(), weight)
    assert not supports(draw(96, 2 * WIDTH)[:, :WIDTH], weight), "rows with gaps"
    assert not supports(x, draw(OUT, 2 * WIDTH)[:, :WIDTH])
    assert not supports(draw(97 * WIDTH)[3 : 3 + 96 * WIDTH].view(96, WIDTH), weight), "an odd address"


def test_an_algorithm_of_another_version_is_not_used(device: ColumnLibrary) -> None:
    device.version = VERSION + 1
    assert not supports(draw(96, WIDTH), draw(OUT, WIDTH))


def test_an_algorithm_that_the_library_refuses_is_not_used(device: ColumnLibrary) -> None:
    device.refused = True
    assert not supports(draw(96, WIDTH), draw(OUT, WIDTH))
    device.refused, device.workspace = False, cublaslt.WORKSPACE_BYTES + 1
    assert not supports(draw(95, WIDTH), draw(OUT, WIDTH)), "more workspace than there is"
    assert not device.multiplied_by


def test_it_is_for_inference_that_is_not_deterministic() -> None:
    for kinds, there in (({}, True), ({"deterministic": True}, False), ({"differentiable": True}, False)):
        names = [candidate.name for candidate in linear.bind("cuda", **kinds).candidates]
        assert ("cublaslt measured" in names) == there


def test_of_a_device_that_is_not_here_nothing_is_asked() -> None:
    limits = DeviceLimits("NVIDIA H200", (9, 0), 227 * 1024, 132)
    x, weight = (
        as_if_on(limits, torch.empty(shape, device="meta", dtype=torch.bfloat16))
        for shape in ((96, 4096), (4096, 4096))
    )
    assert not supports(x, weight)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"version": VERSION, "algorithm": "00" * 63},
        {"version": VERSION, "algorithm": "xy" * 64},
        {"version": VERSION, "algorithm": 5},
        {"version": "13", "algorithm": "00" * 64},
        {"version": VERSION, "algorithm": "00" * 64, "workspace": 0},
    ],
)
def test_an_entry_without_an_algorithm_is_named(parameters: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rows=96.*algorithm"):
        algorithms_of({key(96): Choice("cublaslt", parameters, 1e-5, 1e-5)}, VERSION)


def test_a_table_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned.write(path, "NVIDIA Test 1", TABLE)
    assert algorithms_of(tuned.read_file(path), VERSION) == algorithms_of(TABLE, VERSION)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_algorithms_of_the_package_gain_what_measurements_can_tell(path: Path) -> None:
    entries = tuned.read_file(path)
    versions = {choice.parameters["version"] for choice in entries.values() if choice.implementation == "cublaslt"}
    assert len(versions) <= 1, "one library"
    for version in versions:
        assert any(algorithms_of(entries, version).values())
    for key, choice in entries.items():
        if choice.implementation == "cublaslt":
            assert key.operation == "linear"
            assert key.rows <= MOST_ROWS
            assert choice.seconds * 1.02 < choice.library_seconds
