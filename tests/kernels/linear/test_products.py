"""Products with what stands around them: gates, halves of norms, slices of their width. What they compute and cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.linear.linear import sliced_linear
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.pairwise import pairwise_sum


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_it_is_the_product_gated(lead: tuple[int, ...], bias: bool) -> None:
    x, weight, added = torch.randn(*lead, 24), torch.randn(14, 24), torch.randn(14) if bias else None
    gate = F.linear(x, weight[:7], None if added is None else added[:7])
    up = F.linear(x, weight[7:], None if added is None else added[7:])
    torch.testing.assert_close(linear_silu_mul(x, weight, added), gate / (1 + torch.exp(-gate)) * up)


EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_the_two_halves_make_a_norm_between_two_products(lead: tuple[int, ...], bias: bool) -> None:
    x, residual = draw(*lead, 24), draw(*lead, 40)
    first, second, norm_weight = draw(40, 24), draw(14, 40), draw(40)
    biases = (draw(40), draw(14)) if bias else (None, None)
    total, weighted, squares = linear_add(x, first, biases[0], residual, norm_weight)
    expected = F.linear(x, first, biases[0]) + residual
    torch.testing.assert_close(total, expected)
    following = F.linear(F.rms_norm(expected, (40,), norm_weight, EPS), second, biases[1])
    torch.testing.assert_close(scaled_linear(weighted, squares, EPS, second, biases[1]), following)
    gate, up = following[..., :7], following[..., 7:]
    gated = scaled_linear_silu_mul(weighted, squares, EPS, second, biases[1])
    torch.testing.assert_close(gated, F.silu(gate) * up)


def test_squares_may_come_in_any_number_of_blocks() -> None:
    total, norm_weight, weight = draw(6, 32), draw(32), draw(9, 32)
    whole = total.square().sum(-1, keepdim=True)
    blocks = total.square().view(6, 8, 4).sum(-1)
    given = total * norm_weight
    torch.testing.assert_close(
        scaled_linear(given, blocks, EPS, weight, None), scaled_linear(given, whole, EPS, weight, None)
    )


def test_squares_are_of_the_sum_as_it_is_rounded() -> None:
    x, weight, residual = (draw(*shape, dtype=torch.bfloat16) for shape in ((3, 16), (8, 16), (3, 8)))
    total, weighted, squares = linear_add(x, weight, None, residual, torch.ones(8, dtype=torch.bfloat16))
    assert (total.dtype, weighted.dtype, squares.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(weighted, total)
    torch.testing.assert_close(squares, total.float().square().sum(-1, keepdim=True))


SLICED_DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 64, 128), (1, 40, 24), (33, 128, 512)]


def operands(rows: int, out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, width, generator=generator) for size in (rows, out))
    return x.to(dtype), (weight / width**0.5).to(dtype)


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
@pytest.mark.parametrize("slices", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", SLICED_DTYPES)
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
@pytest.mark.parametrize("dtype", SLICED_DTYPES)
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
