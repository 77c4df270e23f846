"""The gated half of an MLP in one operation: it is what its parts are, and its cost is the hand count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.silu_mul import linear_silu_mul

ROWS, WIDTH, INNER = 7, 64, 48


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_it_is_the_product_gated(lead: tuple[int, ...], bias: bool) -> None:
    x, weight, added = torch.randn(*lead, 24), torch.randn(14, 24), torch.randn(14) if bias else None
    gate = F.linear(x, weight[:7], None if added is None else added[:7])
    up = F.linear(x, weight[7:], None if added is None else added[7:])
    torch.testing.assert_close(linear_silu_mul(x, weight, added), gate / (1 + torch.exp(-gate)) * up)


def test_cost() -> None:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    x, weight, bias = meta(ROWS, WIDTH), meta(2 * INNER, WIDTH), meta(2 * INNER)
    workload = Workload((1,) * ROWS, (1,) * ROWS)
    product, gating = 2 * ROWS * WIDTH * 2 * INNER, 5 * ROWS * INNER
    read, weights, written = 2 * ROWS * WIDTH, 2 * WIDTH * 2 * INNER, 2 * ROWS * INNER
    plain = linear_silu_mul.cost(x, weight, None, workload=workload)
    assert plain == Cost(product + gating, read + weights, written, weights)
    biased = linear_silu_mul.cost(x, weight, bias, workload=workload)
    weights += 2 * 2 * INNER
    assert biased == Cost(product + ROWS * 2 * INNER + gating, read + weights, written, weights)
    assert linear_silu_mul.meta(x, weight, bias).shape == (ROWS, INNER)
