"""Experts on CUDA: the grouped product and its gradients against float64, and that nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.moe_experts import experts, grouped
from strata.kernels.moe_route import route

pytestmark = pytest.mark.gpu


def inputs(tokens: int, count: int = 8, hidden: int = 256, width: int = 128) -> list[Tensor]:
    """The last expert is never chosen."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, count, device="cuda")
    logits[:, -1] = -100
    weights, chosen = route(logits, None, 2, True)
    matrices = torch.randn(count, 2 * width, hidden, device="cuda"), torch.randn(count, hidden, width, device="cuda")
    floats = [torch.randn(tokens, hidden, device="cuda"), *(matrix / 16 for matrix in matrices)]
    x, gate_up, down = (one.to(torch.bfloat16) for one in floats)
    return [x, weights, chosen, gate_up, down]


def with_gradients(run: object, given: list[Tensor], slope: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in given]
    assert callable(run)
    result = run(*leaves)
    result.backward(slope.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
def test_grouped_products_are_near_float64(tokens: int) -> None:
    given = inputs(tokens)
    exact = [one.double() if one.is_floating_point() else one for one in given]
    # No random slope: the gradient of a weight is then a sum of 256 terms that may all but cancel.
    slope = experts.reference(*exact).to(torch.bfloat16)
    found, wanted = with_gradients(grouped, given, slope), with_gradients(experts.reference, exact, slope)
    assert len(found) == 5
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.double() - other).norm() <= 0.01 * other.norm()
    assert not found[3][-1].any()
    assert not found[4][-1].any()


def test_nothing_waits_for_the_device() -> None:
    given = inputs(100)
    slope = torch.randn(100, 256, device="cuda").to(torch.bfloat16)
    chosen = experts.bind("cuda", differentiable=True).choose(*given)
    assert chosen.name == "grouped"
    with_gradients(chosen.run, given, slope)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(chosen.run, given, slope)
    finally:
        torch.cuda.set_sync_debug_mode("default")
