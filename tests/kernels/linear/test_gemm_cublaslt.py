"""What cuBLASLt is told of a product, against a library that multiplies matrices stored by columns on the CPU."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.linear import cublaslt as gemm_cublaslt
from strata.kernels.linear.cublaslt import cublaslt_linear, supports
from tests.kernels.linear.column_library import ColumnLibrary


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
    product = gemm_cublaslt.Product(torch.device("cpu"), torch.bfloat16, 3, 24, 40, 40, 40, False)
    found = product.proposals(3)
    assert [int.from_bytes(one[:8], "little") for one in found] == [1, 2, 3]
    assert {len(one) for one in found} == {gemm_cublaslt.ALGORITHM_BYTES}
    assert library.preferred[3] == 0, "CUBLASLT_REDUCTION_SCHEME_NONE"
    assert_product(draw(3, 40), draw(24, 40))
    assert library.multiplied_by == [found[0]]
