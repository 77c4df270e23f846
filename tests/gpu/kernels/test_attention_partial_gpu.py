"""Attention to a part of the keys by each library, against the reference in float64: forward, sums and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.attention.partial import VisibleKeys, partial_attention, partial_attention_gradients
from strata.kernels.op import Operation
from tests.gpu.tensors import assert_within, draw

pytestmark = pytest.mark.gpu

# Queries and keys of each sequence, and whether the part is causal.
Case = tuple[list[int], list[int], bool]
UNEVEN: list[Case] = [
    ([700, 1, 300], [700, 1, 300], True),
    ([700, 1, 300], [64, 900, 3], False),
    # One query a sequence, which FlashAttention-2 takes another way.
    ([1, 1, 1], [5, 900, 1], False),
    ([1, 1], [1, 1], True),
]
EVEN: list[Case] = [
    ([4096], [4096], True),
    ([4096], [2048], False),
    ([512], [1024], False),
    ([1024, 1024], [1024, 1024], True),
    ([512, 512, 512], [1024, 1024, 1024], False),
    ([1000], [1000], True),
    ([333, 333, 333], [333, 333, 333], True),
    ([333, 333], [1000, 1000], False),
    ([1000, 1000, 1000], [333, 333, 333], False),
]
HEADS = [(8, 2, 128), (4, 4, 64), (4, 1, 64)]


def part_of(queries: list[int], keys: list[int], causal: bool) -> VisibleKeys:
    offsets = (torch.tensor([0, *each], device="cuda").cumsum(0).int() for each in (queries, keys))
    return VisibleKeys(*offsets, max(queries), max(keys), causal)


def named(operation: Operation, name: str) -> Callable[..., Any]:
    found = next(one.run for one in operation.implementations if (one.device, one.name) == ("cuda", name))
    return operation.of_arguments(found)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@pytest.mark.parametrize(
    ("name", "case"), [*product(["flash"], UNEVEN), *product(["flash", "cudnn"], EVEN)], ids=lambda one: str(one)
)
def test_parts_and_their_gradients(name: str, case: Case, heads: int, kv_heads: int, width: int) -> None:
    queries, keys, causal = case
    part, scale = part_of(queries, keys, causal), width**-0.5
    q = draw(sum(queries), heads, width)
    # Keys and values as the ring has them: halves of one tensor.
    k, v = draw(2, sum(keys), kv_heads, width)
    wide = [one.double() for one in (q, k, v)]
    exact, exact_sums = partial_attention.reference(*wide, part, scale)
    out, sums = named(partial_attention, name)(q, k, v, part, scale)
    assert_within(out, exact, 1e-2)
    assert sums.shape == (len(q), heads)
    torch.testing.assert_close(sums.double(), exact_sums, rtol=1e-3, atol=1e-3)
    # As if there were other keys, too: the gradients are those of the joined result.
    slope, total, sums_of_all = draw(*q.shape), exact + torch.randn_like(exact) / 4, exact_sums + 0.7
    found = named(partial_attention_gradients, name)(slope, q, k, v, total.bfloat16(), sums_of_all.float(), part, scale)
    wanted = partial_attention_gradients.reference(
        slope.double(), *wide, total.bfloat16().double(), sums_of_all, part, scale
    )
    for mine, other in zip(found, wanted, strict=True):
        assert_within(mine, other, 1e-2)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize(("sequences", "length", "others"), [(1, 2048, 1024), (2, 512, 1024), (3, 333, 1000)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_gradients_of_two_parts_that_are_joined(
    sequences: int, length: int, others: int, heads: int, kv_heads: int, width: int, name: str
) -> None:
    """As in the ring: of a sequence's own keys up to each query, and of all that come before them."""
    scale, (q, slope) = width**-0.5, draw(2, sequences * length, heads, width)
    counts = [([length] * sequences, [length] * sequences, True), ([length] * sequences, [others] * sequences, False)]
    parts = [(part_of(*each), *draw(2, sum(each[1]), kv_heads, width)) for each in counts]

    def joined(run: Callable[..., Any], *leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        made = [run(*given, part, scale) for given, (part, *_) in zip(leaves, parts, strict=True)]
        sums = torch.logaddexp(made[0][1], made[1][1])
        return sum(out * (own - sums).exp()[..., None] for out, own in made), sums

    narrow = [(q, k, v) for _, k, v in parts]
    wide = [tuple(one.double() for one in each) for each in narrow]
    exact = joined(partial_attention.reference, *wide)
    out, sums = joined(named(partial_attention, name), *narrow)
    assert_within(out, exact[0], 1e-2)
    found_q, wanted_q = torch.zeros_like(exact[0]), torch.zeros_like(exact[0])
    for given, exactly, (part, *_) in zip(narrow, wide, parts, strict=True):
        wanted = partial_attention_gradients.reference(slope.double(), *exactly, *exact, part, scale)
        found = named(partial_attention_gradients, name)(slope, *given, out.bfloat16(), sums, part, scale)
        for mine, other in zip(found[1:], wanted[1:], strict=True):
            assert_within(mine, other, 1e-2)
        wanted_q += wanted[0]
        found_q += found[0]
    assert_within(found_q, wanted_q, 1e-2)


@pytest.mark.parametrize("case", [UNEVEN[0], UNEVEN[1], EVEN[0], EVEN[1]], ids=lambda one: str(one))
def test_deterministic_runs_repeat_every_bit(case: Case) -> None:
    part, scale = part_of(*case), 128**-0.5
    q, slope = draw(2, sum(case[0]), 8, 128)
    k, v = draw(2, sum(case[1]), 2, 128)
    torch.use_deterministic_algorithms(True)
    try:
        out, sums = partial_attention(q, k, v, part, scale)
        found, again = (partial_attention_gradients(slope, q, k, v, out, sums, part, scale) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
