"""8-bit matrices, products and layers on CUDA against the CPU's reference and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strata.kernels.activation import silu_mul_grad as activation_grad  # noqa: F401  registers what is tested
from strata.kernels.linear.fp8 import linear_fp8, linear_silu_mul_fp8
from strata.kernels.quant.fp8 import quantize, scaled_product
from tests.gpu.tensors import assert_within

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(*shape: int) -> Tensor:
    return (torch.randn(*shape) * torch.exp(torch.randn(*shape))).bfloat16().cuda()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(1, 16), (130, 48), (333, 2048), (4096, 1040)])
def test_quantization(shape: tuple[int, int], kind: torch.dtype, per_row: bool) -> None:
    x = draw(*shape)
    x[0, :8] = 0
    assert quantize.bind("cuda").choose(x, kind, per_row).name == "triton"
    found, wanted = quantize(x, kind, per_row), quantize(x.cpu(), kind, per_row)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_a_column_slice_and_nan() -> None:
    x = draw(64, 96)[:, 16:64]
    for mine, theirs in zip(quantize(x, E4M3, True), quantize(x.contiguous(), E4M3, True), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    x[3, 5] = torch.nan
    assert quantize(x, E4M3, False)[0].float()[3, 5].isnan()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("sizes", [(7, 64, 32), (300, 512, 1024), (2048, 256, 96)])
def test_products(sizes: tuple[int, int, int], per_row: bool, fast: bool) -> None:
    rows, columns, width = sizes
    a, b = (
        quantize(draw(rows, width), E4M3 if per_row else E5M2, per_row),
        quantize(draw(columns, width), E4M3, per_row),
    )
    args = (a[0], a[2], b[0], b[2])
    exact = (a[0].double() * a[2]) @ (b[0].double() * b[2]).t()
    assert_within(scaled_product(*args, torch.bfloat16, fast), exact, 2e-2 if fast else 4e-3)


LAYERS: dict[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    linear_fp8: lambda x, weight: x @ weight.t(),
    linear_silu_mul_fp8: lambda x, weight: silu_mul(*(x @ weight.t()).chunk(2, -1)),
}


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def result_and_gradients(
    layer: Callable[..., Tensor], x: Tensor, weight: Tensor, upstream: Tensor, *more: object
) -> list[Tensor]:
    leaves = [one.detach().requires_grad_() for one in (x / 16, weight / 16)]
    result = layer(*leaves, *more)
    result.backward(upstream)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("tokens", [16, 333, 4096])
def test_layers_follow_the_reference(tokens: int, per_row: bool) -> None:
    """The CPU rounds to the same 8 bits and adds up in float32: shorter sums cost less than the 8 bits do."""
    x, weight, upstream = draw(tokens, 256), draw(512, 256), draw(tokens, 512)
    for layer, given in ((linear_fp8, upstream), (linear_silu_mul_fp8, upstream[:, :256])):
        drawn = (x, weight, given)
        on_gpu = result_and_gradients(layer, *drawn, None, per_row)
        on_cpu = result_and_gradients(layer, *(one.cpu() for one in drawn), None, per_row)
        exact = result_and_gradients(LAYERS[layer], *(one.double() for one in drawn))
        for found, wanted, unrounded in zip(on_gpu, on_cpu, exact, strict=True):
            assert found.dtype == torch.bfloat16
            lost = (wanted.double() - unrounded.cpu()).norm() / wanted.double().norm()
            assert_within(found, wanted, lost.item())
