"""Products in slices of their width: what they compute, and that branches of the sum have the bits of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.sliced import sliced_linear
from strata.kernels.pairwise import pairwise_sum

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 64, 128), (1, 40, 24), (33, 128, 512)]


def operands(rows: int, out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, width, generator=generator) for size in (rows, out))
    return x.to(dtype), (weight / width**0.5).to(dtype)


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "width"), SHAPES)
def test_the_sum_is_the_product(
    rows: int, out: int, width: int, dtype: torch.dtype, slices: int, way: dict[str, bool]
) -> None:
    x, weight = operands(rows, out, width, dtype)
    expected = x.double() @ weight.double().T
    run = sliced_linear.bind("cpu", **way)
    wide, rounded = run(x, weight, slices, True), run(x, weight, slices, False)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(rounded, wide.to(dtype))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "width"), SHAPES)
def test_ranks_add_up_to_the_bits_of_one(rows: int, out: int, width: int, dtype: torch.dtype, ranks: int) -> None:
    x, weight = operands(rows, out, width, dtype)
    run = sliced_linear.bind("cpu", deterministic=True)
    own = [
        run(some.contiguous(), columns.contiguous(), 8 // ranks, True)
        for some, columns in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
    ]
    assert torch.equal(pairwise_sum(own).to(dtype), run(x, weight, 8, False))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = operands(70, 64, 128, torch.float32)
    run = sliced_linear.bind("cpu", deterministic=True)
    whole = run(x, weight, 8, True)
    for rows in ([3], [69, 0], list(range(40))):
        assert torch.equal(run(x[rows], weight, 8, True), whole[rows])


def test_neighbours_are_added_first() -> None:
    parts = [torch.tensor(value) for value in (1.0, 1e8, -1e8, 1.0, 3.0)]
    assert pairwise_sum(parts).item() == 3.0  # both ones are lost beside 1e8; one after another, the second would stay
    assert pairwise_sum(parts[:1]) is parts[0]


@pytest.mark.parametrize(("slices", "width"), [(3, 24), (16, 32), (8, 20), (0, 8)])
def test_slices_that_are_none(slices: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{slices} slices of a width of {width}; accepted are 1, 2, 4 and 8"):
        sliced_linear(torch.zeros(2, width), torch.zeros(4, width), slices, True)


def test_the_cost_is_the_products_and_that_of_the_sums() -> None:
    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((7, 64), (96, 64)))
    product, elements = 2 * 7 * 96 * 64, 7 * 96
    read = 2 * (7 * 64 + 96 * 64)
    for wide, bytes_each in ((True, 4), (False, 2)):
        expected = Cost(product + 7 * elements, read, bytes_each * elements, 2 * 96 * 64)
        assert sliced_linear.cost(x, weight, 8, wide, workload=Workload((7,), (7,))) == expected
        assert sliced_linear.meta(x, weight, 8, wide).dtype == (torch.float32 if wide else torch.bfloat16)
