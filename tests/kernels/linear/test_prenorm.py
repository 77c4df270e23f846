"""Products around a norm: together they are the norm and its products, and their costs are the hand counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.op import Operation

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


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


ROWS, WIDTH, OUT, BLOCKS = 7, 64, 48, 3
PRODUCT = 2 * ROWS * WIDTH * OUT
X, SUM, WEIGHT, BIAS = 2 * ROWS * WIDTH, 2 * ROWS * OUT, 2 * WIDTH * OUT, 2 * OUT
SQUARES = 4 * ROWS * BLOCKS
SCALED = (meta(ROWS, WIDTH), meta(ROWS, BLOCKS, dtype=torch.float32), EPS, meta(OUT, WIDTH), meta(OUT))
HAND_COUNTS = [
    (
        linear_add,
        (meta(ROWS, WIDTH), meta(OUT, WIDTH), meta(OUT), meta(ROWS, OUT), meta(OUT)),
        # Of each element: bias, residual, the norm's weight, a square and its addition.
        Cost(PRODUCT + 5 * ROWS * OUT, X + SUM + WEIGHT + 2 * BIAS, 2 * SUM + 4 * ROWS, WEIGHT + 2 * BIAS),
    ),
    (
        scaled_linear,
        SCALED,
        Cost(PRODUCT + 2 * ROWS * OUT, X + SQUARES + WEIGHT + BIAS, SUM, WEIGHT + BIAS),
    ),
    (
        scaled_linear_silu_mul,
        SCALED,
        # Scale and bias for both halves, five operations for each element of the result.
        Cost(PRODUCT + 2 * ROWS * OUT + 5 * ROWS * OUT // 2, X + SQUARES + WEIGHT + BIAS, SUM // 2, WEIGHT + BIAS),
    ),
]


@pytest.mark.parametrize(("operation", "given", "expected"), HAND_COUNTS)
def test_costs_are_the_hand_counts(operation: Operation, given: tuple, expected: Cost) -> None:
    assert operation.cost(*given, workload=Workload((ROWS,), (ROWS,))) == expected


@pytest.mark.parametrize(("operation", "given", "_"), HAND_COUNTS)
def test_meta_results_have_the_shape_and_dtype_of_real_ones(operation: Operation, given: tuple, _: Cost) -> None:
    real = [torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x for x in given]
    results = [x if isinstance(x, tuple) else (x,) for x in (operation(*given), operation(*real))]
    for empty, full in zip(*results, strict=True):
        assert empty.is_meta
        assert (empty.shape, empty.dtype) == (full.shape, full.dtype)
