"""The Triton kernels of routing in Triton's interpreter, against references: run by `test_interpreted`.

Under newer numpys Triton 3.6 takes no bounds of loops, which `_counts` of the collective kernels mends.
"""

from __future__ import annotations

from dataclasses import astuple

import torch

from strata.kernels.moe import held_order
from strata.kernels.moe.held_order import held_numbers
from strata.kernels.moe.order import Order
from strata.kernels.moe.route import SOFTMAX, in_one_launch, route
from tests.kernels.collective.interpreted import _counts

from .routes import ROUTES, assert_no_number_leads_astray, assert_routed, assert_ties_go_to_the_lower_number, distinct


def routes() -> None:
    for count, per_token, biased, normalized, choice in ROUTES.values():
        bias = torch.randn(count) * 0.3 if biased else None
        how, logits = (per_token, normalized, choice), torch.randn(2, count + 3)[:, 1 : count + 1]
        assert route.bind("cuda").choose(logits, bias, *how).run is in_one_launch
        assert_routed(in_one_launch, logits, bias, *how)
        assert_routed(in_one_launch, logits[:0], bias, *how)


def orders() -> None:
    """As sorted by torch, of few choices and of many."""
    placement, mapping = torch.randint(20, (16, 6), dtype=torch.int32), torch.randint(-1, 2, (50,), dtype=torch.int32)
    held_order.implementations_for = lambda device: "cuda"  # type: ignore[assignment]
    for most in (held_order.MOST_CHOICES, 0):
        held_order.MOST_CHOICES = most
        for tokens, first, held, *tables in (
            (50, 0, 16),
            (50, 3, 9, None, mapping),
            (50, 13, 7, placement, mapping),
            (0, 0, 16),
        ):
            chosen = torch.randint(-1 if not tables else 0, 16, (tokens, 3), dtype=torch.int32)
            numbers = held_numbers(chosen, first, held, *(tables or [None]))
            found, wanted = held_order.held_order(chosen, first, held, *tables), Order.of(numbers, held, empty=True)
            for mine, other in zip(astuple(found), astuple(wanted), strict=True):
                assert mine.dtype == other.dtype
                assert torch.equal(mine, other)


if __name__ == "__main__":
    _counts()
    torch.manual_seed(0)
    orders()
    routes()
    assert_routed(in_one_launch, distinct(3, 64, torch.float16, "cpu"), None, 6, True, SOFTMAX)
    assert_ties_go_to_the_lower_number(in_one_launch, "cpu")
    for name in ("odd", "V2", "odd groups"):
        assert_no_number_leads_astray(in_one_launch, "cpu", *ROUTES[name])
    print("equal")
