"""The Triton kernels of mixtures in Triton's interpreter, against references: run by `test_interpreted`."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from unittest import mock

import torch

from strata.kernels.activation.clamped_swiglu import Clamp, clamped_swiglu
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.moe import local_order
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.experts import biased_experts, experts
from strata.kernels.moe.few_tokens import ChoiceTile, by_choices
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.grouped_tiles import GroupedTile
from strata.kernels.moe.local_order import local_numbers
from strata.kernels.moe.order import Order
from strata.kernels.moe.route import SOFTMAX, in_one_launch, route
from tests.kernels.interpreter import prepare_interpreter

from .packed_interpreted import packed_products
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
    local_order.implementations_for = lambda device: "cuda"  # type: ignore[assignment]
    for counts in (False, True):
        local_order.sorts_by_counting = lambda chosen, counts=counts: counts  # type: ignore[assignment,misc]
        for tokens, first, held, *tables in (
            (50, 0, 16),
            (50, 3, 9, None, mapping),
            (50, 13, 7, placement, mapping),
            (0, 0, 16),
        ):
            chosen = torch.randint(-1 if not tables else 0, 16, (tokens, 3), dtype=torch.int32)
            numbers = local_numbers(chosen, first, held, *(tables or [None]))
            found, wanted = local_order.local_order(chosen, first, held, *tables), Order.of(numbers, held, empty=True)
            for mine, other in zip(astuple(found), astuple(wanted), strict=True):
                assert mine.dtype == other.dtype
                assert torch.equal(mine, other)


def products(turned: bool) -> None:
    """Of experts without rows, with some, and with more than a tile holds; of more experts than a vector of them."""
    for count, tokens, per_token, hidden, out in ((5, 21, 2, 40, 24), (131, 2, 3, 40, 12)):
        chosen = torch.rand(tokens, count - 1).argsort(1)[:, :per_token].contiguous()
        order = Order.of(chosen, count)
        x, expert = torch.randn(tokens, hidden), chosen.flatten()[order.source]
        weight, bias = torch.randn(count, 2 * out, hidden) / 8, torch.randn(count, 2 * out)
        x[0, 1] = torch.nan
        own = x[order.source // per_token]
        both = torch.einsum("rk,rok->ro", own, weight[expert])
        for clamp in (None, Clamp(1.702, 1.0)):
            given = both if clamp is None else both + bias[expert]
            gate, up = given.chunk(2, -1)
            wanted = silu_mul(gate, up) if clamp is None else clamped_swiglu(gate, up, clamp)
            fetched = {"source": order.source, "per_token": per_token, "gated": True, "clamp": clamp}
            more = {"tile": GroupedTile(16, 16, 32, 4, 2, turned)} | ({} if clamp is None else {"bias": bias})
            found = grouped_product(x, weight, order.ends, **fetched, **more)
            plain = grouped_product(own, weight, order.ends, **more)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(plain, given, rtol=1e-4, atol=1e-5, equal_nan=True)


def few_tokens() -> None:
    """Of a token without one of its experts, too; tokens' experts are no power of two."""
    for count, tokens, per_token, hidden, width in ((7, 2, 3, 40, 24), (4, 1, 1, 6, 36)):
        chosen = torch.rand(tokens, count).argsort(1)[:, :per_token].contiguous()
        x, weights = torch.randn(tokens, hidden), torch.rand(tokens, per_token)
        gate_up, down = torch.randn(count, 2 * width, hidden) / 8, torch.randn(count, hidden, width) / 8
        biases, clamp = (torch.randn(count, 2 * width), torch.randn(count, hidden)), Clamp(1.702, 1.0)
        wanted = biased_experts.reference(x, weights, chosen, gate_up, down, *biases, clamp)
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, equal_nan=True)
        by_parts = partial(by_choices, tiles=(ChoiceTile(8, 16, 4), ChoiceTile(8, 16, 4)))
        close(by_parts(BiasedExpertsCall(x, weights, chosen, gate_up, down, *biases, clamp)), wanted)
        wanted = biased_experts.reference(x, weights, chosen, gate_up, down, *biases, clamp, False)
        close(by_parts(BiasedExpertsCall(x, weights, chosen, gate_up, down, *biases, clamp, False)), wanted)
        broken = x.clone()
        broken[-1, 0] = torch.nan
        wanted = biased_experts.reference(broken, weights, chosen, gate_up, down, *biases, clamp)
        close(by_parts(BiasedExpertsCall(broken, weights, chosen, gate_up, down, *biases, clamp)), wanted)
        chosen[0, -1] = -1
        rest = tokens * per_token - 1
        wanted = experts.reference(x, weights, chosen, gate_up, down, rest)
        close(by_parts(ExpertsCall(x, weights, chosen, gate_up, down)), wanted)
        if per_token == 1:
            wanted = experts.reference(x, None, chosen, gate_up, down, rest)
            close(by_parts(ExpertsCall(x, None, chosen, gate_up, down)), wanted)


if __name__ == "__main__":
    prepare_interpreter()
    torch.manual_seed(0)
    orders()
    routes()
    # A GPU that launches nothing early, which the interpreter cannot.
    ampere = DeviceLimits("any", (8, 0), SHARED_BYTES, 108)
    with mock.patch.object(DeviceLimits, "of", return_value=ampere):
        for turned in (False, True):
            products(turned)
        packed_products()
        few_tokens()
    assert_routed(in_one_launch, distinct(3, 64, torch.float16, "cpu"), None, 6, True, SOFTMAX)
    assert_ties_go_to_the_lower_number(in_one_launch, "cpu")
    for name in ("odd", "V2", "odd groups"):
        assert_no_number_leads_astray(in_one_launch, "cpu", *ROUTES[name])
    print("equal")
