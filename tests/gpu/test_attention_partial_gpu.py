"""Attention to a part of the keys by the library, against the reference in float64: forward, sums and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.attention_partial import Part, partial_attention, partial_attention_gradients

pytestmark = pytest.mark.gpu

CASES = [
    ([700, 1, 300], [700, 1, 300], True),
    ([700, 1, 300], [64, 900, 3], False),
    ([4096], [2048], False),
    # One query a sequence, which the library takes another way.
    ([1, 1, 1], [5, 900, 1], False),
    ([1, 1], [1, 1], True),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert found.isfinite().all()
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize(("queries", "keys", "causal"), CASES)
def test_parts_and_their_gradients(
    queries: list[int], keys: list[int], causal: bool, heads: int, kv_heads: int, width: int, deterministic: bool
) -> None:
    offsets = (torch.tensor([0, *each], device="cuda").cumsum(0).int() for each in (queries, keys))
    part, scale = Part(*offsets, max(queries), max(keys), causal), width**-0.5
    q = draw(sum(queries), heads, width)
    # Keys and values as the ring has them: halves of one tensor.
    k, v = draw(2, sum(keys), kv_heads, width)
    assert partial_attention.bind("cuda").choose(q, k, v, part, scale).name == "flash"
    wide = [one.double() for one in (q, k, v)]
    exact, exact_sums = partial_attention.reference(*wide, part, scale)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, sums = partial_attention(q, k, v, part, scale)
        # As if there were other keys, too: the gradients are those of the joined result.
        slope, total, sums_of_all = draw(*q.shape), exact + torch.randn_like(exact) / 4, exact_sums + 0.7
        given = slope, q, k, v, total.bfloat16(), sums_of_all.float()
        assert partial_attention_gradients.bind("cuda").choose(*given, part, scale).name == "flash"
        found = partial_attention_gradients(*given, part, scale)
        if deterministic:
            again = partial_attention_gradients(*given, part, scale)
            assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_near(out, exact)
    assert sums.shape == (len(q), heads)
    torch.testing.assert_close(sums.double(), exact_sums, rtol=1e-3, atol=1e-3)
    wanted = partial_attention_gradients.reference(
        slope.double(), *wide, total.bfloat16().double(), sums_of_all, part, scale
    )
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine, other)
