"""Gated products of many rows, and those that write the float32 gradient of a bfloat16 weight, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.activation import silu_mul_grad as activation_grad  # noqa: F401  registers what is tested
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.linear.fp8 import linear_fp8, linear_fp8_into
from strata.kernels.linear.into import linear_into, linear_silu_mul_into
from strata.kernels.linear.silu_mul import linear_silu_mul
from tests.gpu.tensors import assert_near, assert_within, draw, exact_linear
from tests.kernels.test_training_operations import Target, plain_gated, plain_linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

ROWS = thresholds_of(MEASURED).gated_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 77])
@pytest.mark.parametrize("inner", [8, 136, 520])
def test_against_float64(dtype: torch.dtype, rows: int, inner: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs the copy engine of a Hopper device")
    x = draw(rows, 640, dtype=dtype)[:, 32 : 32 + 600]
    weight, bias = draw(2 * inner, 600, dtype=dtype).div_(600**0.5), draw(2 * inner, dtype=dtype)
    for given in (None, bias):
        chosen = linear_silu_mul.bind("cuda").choose(x, weight, given)
        assert chosen.name == "triton"
        result = chosen.run(x, weight, given)
        gate, up = exact_linear(x, weight, given).chunk(2, 1)
        expected = F.silu(gate) * up
        assert_near(result, expected, 5e-5)


def target_of(weight: Tensor, adds: bool) -> Target:
    return Target(weight.float(), torch.randn(weight.shape, device="cuda") if adds else None)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 8, 16), (333, 72, 80), (4096, 512, 1024)])
def test_gradients_against_float64(rows: int, width: int, out: int, with_bias: bool, gated: bool, adds: bool) -> None:
    x, weight, bias = draw(rows, width).requires_grad_(), draw(out, width).requires_grad_(), draw(out).requires_grad_()
    target = target_of(weight, adds)
    held = target.gradient.double() if adds else 0
    into, plain = (linear_silu_mul_into, plain_gated) if gated else (linear_into, plain_linear)
    result = into(x, weight, bias if with_bias else None, target)
    slope = draw(*result.shape)
    result.backward(slope)
    exact = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    wanted = plain(exact[0], exact[1], exact[2] if with_bias else None)
    wanted.backward(slope.double())
    assert weight.grad is None
    assert_within(result, wanted.detach(), 1e-2)
    # Where nothing is rounded on the way, float32 sums show.
    assert_within(target.gradient, exact[1].grad + held, 1e-2 if gated else 1e-5)
    assert_within(x.grad, exact[0].grad, 1e-2)
    if with_bias:
        assert_within(bias.grad, exact[2].grad, 1e-2)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(16, 32, 16), (352, 80, 64), (4096, 512, 1024)])
def test_gradients_in_eight_bits(rows: int, width: int, out: int, per_row: bool, adds: bool) -> None:
    x, weight, slope = draw(rows, width), draw(out, width).requires_grad_(), draw(rows, out)
    target = target_of(weight, adds)
    held = target.gradient.clone() if adds else 0
    linear_fp8(x, weight, None, per_row).backward(slope)
    wanted, weight.grad = weight.grad, None
    linear_fp8_into(x, weight, None, per_row, target).backward(slope)
    assert weight.grad is None
    # The layer's gradient is rounded to bfloat16, this one need not be.
    assert_within(target.gradient, (held + wanted).double(), 4e-3)
