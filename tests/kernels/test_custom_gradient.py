"""Products at the end of what the backward pass computes again: they are not, whoever gives their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strata.kernels.linear import fp8 as linear_fp8
from strata.kernels.linear import into as linear_into
from tests.kernels.linear.test_linear_into import Target

Product = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_last_product_is_not_computed_again(eight_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its result wrong, or its gradient."""
    x, weight = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    made: list[Tensor] = []
    attached = linear_into.with_gradients_of

    def counting(gradients: Tensor, product: Tensor) -> Tensor:
        made.append(product)
        return attached(gradients, product)

    for module in (linear_into, linear_fp8):
        monkeypatch.setattr(module, "with_gradients_of", counting)
    found = []
    for recompute in (False, True):
        target, given, trained = Target(weight), x.clone().requires_grad_(), weight.clone().requires_grad_()

        def layer(given: Tensor, trained: Tensor = trained, target: Target = target) -> Tensor:
            if eight_bits:
                return given + linear_fp8.linear_fp8_into(given.exp(), trained, None, True, target)
            return given + linear_into.linear_into(given.exp(), trained, None, target)

        result = checkpoint(layer, given, use_reentrant=False) if recompute else layer(given)
        result.square().sum().backward()
        found.append((result, given.grad, target.gradient))
    assert len(made) == 2
    assert all(map(torch.equal, *found))
    if not eight_bits:
        torch.testing.assert_close(found[0][0], x + x.exp() @ weight.t())
