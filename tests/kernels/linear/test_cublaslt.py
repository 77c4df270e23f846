"""What cuBLASLt is told of a product, and which a table's algorithms serve, by a library of matrices by columns."""

from __future__ import annotations

import ctypes
import gc
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
from strata.kernels.linear import cublaslt as gemm_cublaslt
from strata.kernels.linear.cublaslt import cublaslt_linear, supports
from strata.kernels.linear.linear import linear
from strata.kernels.linear.measured_algorithms import MAX_ROWS, algorithms_of, measured_linear
from strata.kernels.linear.measured_algorithms import supports as has_algorithm
from strata.kernels.tuned import Key, TunedChoice
from tests.kernels.linear.column_library import ColumnLibrary


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ColumnLibrary]:
    fake = ColumnLibrary()
    monkeypatch.setattr(gemm_cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(gemm_cublaslt, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(gemm_cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(gemm_cublaslt, "_available", lambda device: True)
    for made in (gemm_cublaslt._product, gemm_cublaslt.product_by):
        made.cache_clear()
    yield fake
    for made in (gemm_cublaslt._product, gemm_cublaslt.product_by):
        made.cache_clear()
    gc.collect()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def assert_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    result = cublaslt_linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert result.shape == exact.shape
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_product(library: ColumnLibrary, rows: int, dtype: torch.dtype) -> None:
    weight, bias = draw(24, 40, dtype=dtype), draw(24, dtype=dtype)
    assert_product(draw(rows, 40, dtype=dtype), weight)
    assert_product(draw(rows, 40, dtype=dtype), weight, bias)
    assert_product(draw(2, rows, 40, dtype=dtype), weight, bias)


def test_operands_with_strides(library: ColumnLibrary) -> None:
    weight = draw(24, 64)[:, 16:56]
    assert_product(draw(7, 80)[:, 8:48], weight)
    assert_product(draw(1, 80)[:, 8:48], weight)
    assert_product(draw(80, 7).t()[:, 8:48], weight)
    assert_product(draw(1, 40).expand(7, 40), weight)


def test_rows_that_lie_at_odd_addresses_are_copied(library: ColumnLibrary) -> None:
    weight = draw(24, 40)
    assert_product(draw(7, 43)[:, 3:], weight)
    assert_product(draw(283)[3:].view(7, 40), weight)
    assert all(address % 16 == 0 for address in library.addresses)


def test_each_call_has_its_own_bias(library: ColumnLibrary) -> None:
    x, weight = draw(3, 40), draw(24, 40)
    for _ in range(2):
        assert_product(x, weight, draw(24))
    assert gemm_cublaslt._product.cache_info().misses == 1


def test_no_algorithm_may_split_k(library: ColumnLibrary) -> None:
    assert_product(draw(3, 40), draw(24, 40))
    workspace, reduction = library.preferred.pop(1), library.preferred.pop(3)
    assert workspace < 4 * 3 * 24 * 8, "room for the parts of a product"
    assert reduction == 0, "CUBLASLT_REDUCTION_SCHEME_NONE"
    assert library.preferred == dict.fromkeys((5, 6, 7, 8), 16), "alignment of A, B, C and D"


def test_a_refusal_says_what_was_asked(library: ColumnLibrary) -> None:
    library.algorithms = 0
    with pytest.raises(RuntimeError, match=r"no algorithm without split k for 3 rows by \[24, 40\] in torch.bfloat16"):
        cublaslt_linear(draw(3, 40), draw(24, 40))
    library.status = 7
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulAlgoGetHeuristic failed: the reason \(status 7\)"):
        cublaslt_linear(draw(3, 40), draw(24, 40))


def test_what_was_prepared_is_released(library: ColumnLibrary) -> None:
    for rows in range(1, 4):
        assert_product(draw(rows, 40), draw(24, 40))
    assert library.objects
    gemm_cublaslt._product.cache_clear()
    gc.collect()
    assert library.made
    assert not library.objects


def test_the_weight_alone_decides(library: ColumnLibrary) -> None:
    weight, bias = draw(1024, 1024), draw(1024)
    for x in (draw(1, 1024), draw(9000, 1024), draw(3, 1027)[:, 3:]):
        assert supports(x, weight, bias)
    x = draw(2, 1024)
    assert not supports(x, draw(1020, 1024), None), "a small weight"
    assert not supports(x, draw(1026, 1024), None), "rows of the result that are no multiple of 16 bytes"
    assert not supports(draw(2, 1026), draw(1024, 1026), None), "nor those of x"
    assert not supports(x, draw(1024, 1028)[:, :1024], None), "nor those of the weight"
    assert not supports(x, draw(1 + (1 << 20))[1:].view(1024, 1024), None), "a weight at an odd address"
    assert not supports(x, weight, draw(1025)[1:]), "a bias at an odd address"
    assert not supports(x, draw(1024, 1024).t(), None)
    assert not supports(x.float(), weight.float(), None)


def test_structure_has_the_size_of_the_header() -> None:
    assert ctypes.sizeof(gemm_cublaslt._HeuristicResult) == 96


def test_without_cuda_there_is_no_library() -> None:
    if not torch.cuda.is_available():
        assert gemm_cublaslt._library() is None
        assert not supports(draw(1, 1024), draw(1024, 1024))


def test_proposals_are_what_the_library_would_choose_first_and_others(library: ColumnLibrary) -> None:
    library.algorithms = 5
    product = gemm_cublaslt.CublasLtProduct(torch.device("cpu"), torch.bfloat16, 3, 24, 40, 40, 40, False)
    found = product.proposals(3)
    assert [int.from_bytes(one[:8], "little") for one in found] == [1, 2, 3]
    assert {len(one) for one in found} == {gemm_cublaslt.ALGORITHM_BYTES}
    assert library.preferred[3] == 0, "CUBLASLT_REDUCTION_SCHEME_NONE"
    assert_product(draw(3, 40), draw(24, 40))
    assert library.multiplied_by == [found[0]]


VERSION = 130100
OUT, WIDTH = 1024, 1032
TABLES = Path(strata.kernels.__file__).parent / "tuned"


def algorithm(rows: int) -> bytes:
    return rows.to_bytes(8, "little") * 8


def choice_of(rows: int, version: int = VERSION) -> TunedChoice:
    return TunedChoice("cublaslt", {"version": version, "algorithm": algorithm(rows).hex()}, 1e-5, 2e-5)


def key_of(rows: int, out: int = OUT) -> Key:
    return Key("linear", "bfloat16", out, WIDTH, rows)


TABLE = {
    key_of(64): TunedChoice("small M", {"kernel": "dot", "columns": 64, "width": 8, "warps": 4}, 1e-5, 2e-5),
    key_of(96): choice_of(96),
    key_of(160): TunedChoice("cublas", {}, 1e-5, 1e-5),
    key_of(192): choice_of(192),
    key_of(1024): choice_of(1024),
    key_of(2048): choice_of(2048),
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


def served(rows: int) -> bytes | None:
    return tuned.serving(algorithms_of(TABLE, VERSION), key_of(rows))


def test_rows_take_the_algorithm_of_the_next_larger_number_that_was_measured() -> None:
    found = {rows: served(rows) for rows in range(1, 2049)}
    wanted = {96: range(65, 97), 192: range(161, 193), 1024: range(513, 1025), 2048: range(1025, 2049)}
    expected = {rows: algorithm(edge) for edge, among in wanted.items() for rows in among}
    assert {rows: one for rows, one in found.items() if one is not None} == expected


def test_it_reaches_the_library_as_it_is_stored(device: ColumnLibrary) -> None:
    weight = draw(OUT, WIDTH)
    for rows, edge in ((96, 96), (70, 96), (180, 192)):
        x = draw(rows, WIDTH)
        assert has_algorithm(x, weight)
        result = measured_linear(x, weight)
        assert device.multiplied_by[-1] == algorithm(edge)
        exact = F.linear(x.double(), weight.double())
        torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=1e-3)
        assert measured_linear(x.view(2, rows // 2, WIDTH), weight).shape == (2, rows // 2, OUT)


def test_each_shape_is_prepared_once(device: ColumnLibrary) -> None:
    weight, x = draw(OUT, WIDTH), draw(96, WIDTH)
    for _ in range(3):
        assert has_algorithm(x, weight)
        measured_linear(x, weight)
    assert cublaslt.product_by.cache_info().misses == 1


def test_what_was_not_measured_is_left_to_others(device: ColumnLibrary) -> None:
    weight, x = draw(OUT, WIDTH), draw(96, WIDTH)
    assert has_algorithm(x, weight)
    assert not has_algorithm(draw(64, WIDTH), weight), "a tile is faster"
    assert not has_algorithm(draw(130, WIDTH), weight), "F.linear is"
    assert not has_algorithm(draw(256, WIDTH), weight), "rows of which nothing is known"
    assert not has_algorithm(draw(0, WIDTH), weight)
    assert not has_algorithm(draw(MAX_ROWS + 1, WIDTH), weight)
    assert not has_algorithm(x, weight, draw(OUT)), "a bias"
    assert not has_algorithm(x.half(), weight.half())
    assert not has_algorithm(x, draw(OUT + 8, WIDTH)), "another weight"
    assert not has_algorithm(draw(WIDTH, 96).t(), weight)
    assert not has_algorithm(draw(96, 2 * WIDTH)[:, :WIDTH], weight), "rows with gaps"
    assert not has_algorithm(x, draw(OUT, 2 * WIDTH)[:, :WIDTH])
    assert not has_algorithm(draw(97 * WIDTH)[3 : 3 + 96 * WIDTH].view(96, WIDTH), weight), "an odd address"


def test_an_algorithm_of_another_version_is_not_used(device: ColumnLibrary) -> None:
    device.version = VERSION + 1
    assert not has_algorithm(draw(96, WIDTH), draw(OUT, WIDTH))


def test_an_algorithm_that_the_library_refuses_is_not_used(device: ColumnLibrary) -> None:
    device.refused = True
    assert not has_algorithm(draw(96, WIDTH), draw(OUT, WIDTH))
    device.refused, device.workspace = False, cublaslt.WORKSPACE_BYTES + 1
    assert not has_algorithm(draw(95, WIDTH), draw(OUT, WIDTH)), "more workspace than there is"
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
    assert not has_algorithm(x, weight)


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
        algorithms_of({key_of(96): TunedChoice("cublaslt", parameters, 1e-5, 1e-5)}, VERSION)


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
            assert key.rows <= MAX_ROWS
            assert choice.seconds * 1.02 < choice.library_seconds
