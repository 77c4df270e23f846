"""Products that write their weight's gradient where it is wanted equal autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strata.kernels.gradient_target import GradientTarget
from strata.kernels.linear.fp8 import linear_fp8, linear_fp8_into
from strata.kernels.linear.into import linear_into, linear_silu_mul_into


class Target:
    """A `GradientTarget` of one weight: poisoned memory, or what it holds already."""

    def __init__(self, weight: Tensor, held: Tensor | None = None) -> None:
        self.gradient = torch.full_like(weight, float("nan"), requires_grad=False) if held is None else held.clone()
        self.adds, self.times = held is not None, 0

    def memory(self) -> tuple[Tensor, bool]:
        return self.gradient, self.adds or self.times > 0

    def written(self) -> None:
        self.times += 1


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() + (0 if bias is None else bias)


def plain_gated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = plain_linear(x, weight, bias).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


Into = Callable[[Tensor, Tensor, Tensor | None, GradientTarget], Tensor]


@pytest.mark.parametrize(("into", "plain"), [(linear_into, plain_linear), (linear_silu_mul_into, plain_gated)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 3, 2), (17, 5, 14)])
def test_gradients_equal_those_of_autograd(
    into: Into, plain: Callable[..., Tensor], with_bias: bool, adds: bool, rows: int, width: int, out: int
) -> None:
    draw = torch.Generator().manual_seed(rows + adds)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((rows, width), (out, width), (out,))
    )
    leaves = [x.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]
    result = plain(x, weight, bias if with_bias else None)
    slope = torch.randn(result.shape, dtype=torch.float64, generator=draw)
    wanted = torch.autograd.grad(result, leaves, slope)
    held = torch.randn(out, width, dtype=torch.float64, generator=draw) if adds else None
    target = Target(weight, held)
    made = into(x, weight, bias if with_bias else None, target)
    torch.testing.assert_close(made, result, rtol=1e-12, atol=1e-12)
    made.backward(slope)
    assert target.times == 1
    assert weight.grad is None
    torch.testing.assert_close(target.gradient, wanted[1] + (held if held is not None else 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, wanted[0], rtol=1e-12, atol=1e-12)
    if with_bias:
        torch.testing.assert_close(bias.grad, wanted[2], rtol=1e-12, atol=1e-12)


def test_two_uses_of_a_weight_add_up() -> None:
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    target = Target(weight)
    (linear_into(x, weight, None, target).sum() + linear_into(2 * x, weight, None, target).sum()).backward()
    torch.testing.assert_close(target.gradient, 3 * x.sum(0).expand(2, 3))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_in_eight_bits_are_those_of_the_layer(per_row: bool, adds: bool) -> None:
    x, weight, slope = torch.randn(32, 48), torch.randn(16, 48), torch.randn(32, 16)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    weight.requires_grad_()
    linear_fp8(one, weight, None, per_row).backward(slope)
    held = torch.randn(16, 48) if adds else None
    target = Target(weight, held)
    wanted, weight.grad = weight.grad, None
    linear_fp8_into(other, weight, None, per_row, target).backward(slope)
    assert weight.grad is None
    assert target.times == 1
    assert torch.equal(target.gradient, wanted if held is None else wanted + held)
    assert torch.equal(one.grad, other.grad)
