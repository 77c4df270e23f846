"""The Triton kernels of mixtures in Triton's interpreter, against references: run by `test_interpreted`.

In float32: it computes nothing in bfloat16, and knows no assembly."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial

import pytest
import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp, clamped_swiglu, silu_mul
from strata.kernels.moe import local_order
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.experts import biased_experts, experts
from strata.kernels.moe.grouped import GroupedTile, grouped_product
from strata.kernels.moe.local_order import Order, local_numbers
from strata.kernels.moe.route import SOFTMAX, in_one_launch, route
from strata.kernels.moe.small_m import ChoiceTile, by_choices
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, dense, pack, spread
from strata.kernels.quant.round_rows import round_rows

from .routes import ROUTES, assert_no_number_leads_astray, assert_routed, assert_ties_go_to_the_lower_number, distinct


def test_routes() -> None:
    for count, per_token, biased, normalized, choice in ROUTES.values():
        bias = torch.randn(count) * 0.3 if biased else None
        how, logits = (per_token, normalized, choice), torch.randn(2, count + 3)[:, 1 : count + 1]
        assert route.bind("cuda").choose(logits, bias, *how).run is in_one_launch
        assert_routed(in_one_launch, logits, bias, *how)
        assert_routed(in_one_launch, logits[:0], bias, *how)
    assert_routed(in_one_launch, distinct(3, 64, torch.float16, "cpu"), None, 6, True, SOFTMAX)
    assert_ties_go_to_the_lower_number(in_one_launch, "cpu")
    for name in ("odd", "V2", "odd groups"):
        assert_no_number_leads_astray(in_one_launch, "cpu", *ROUTES[name])


def test_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sorted by torch, of few choices and of many."""
    placement, mapping = torch.randint(20, (16, 6), dtype=torch.int32), torch.randint(-1, 2, (50,), dtype=torch.int32)
    monkeypatch.setattr(local_order, "implementations_for", lambda device: "cuda")
    for counts in (False, True):
        monkeypatch.setattr(local_order, "sorts_by_counting", lambda chosen, counts=counts: counts)
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


@pytest.mark.parametrize("turned", [False, True])
def test_products(turned: bool) -> None:
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


TILES = ChoiceTile(8, 16, 4), ChoiceTile(8, 16, 4)


def test_few_tokens() -> None:
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


COUNT, TOKENS, PER_TOKEN = 4, 12, 2
CLAMP = Clamp(1.702, 1.0)
# Every kind with the steps that take it, of widths that these divide or do not.
CASES: tuple[tuple[Scheme, int, int], ...] = (
    (Scheme("e4m3", 1, 0), 80, 32),
    (Scheme("int8", 0, 0), 64, 32),
    (Scheme("e4m3", 32, 64), 80, 32),
    (Scheme("int4", 1, 64), 128, 64),
    (Scheme("int4", 1, 0), 64, 64),
    (Scheme("e2m1", 1, 32), 96, 64),
    (Scheme("e2m1", 1, 16), 64, 64),
    (Scheme("e2m1", 1, 64), 64, 32),
)


def with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    return weight._replace(zeros=torch.randint(0, 16, weight.scales.shape, dtype=torch.uint8))


def quantized_product(weight: QuantizedWeight, step: int) -> None:
    """Of experts without rows, with some, and with more than a tile holds; one row is NaN and must not reach others."""
    chosen = torch.rand(TOKENS, COUNT - 1).argsort(1)[:, :PER_TOKEN].contiguous()
    order, (_, both, width) = Order.of(chosen, COUNT), weight.shape
    x, bias, expert = torch.randn(TOKENS, 2 * width)[:, :width], torch.randn(COUNT, both), chosen.flatten()
    x[0, 1] = torch.nan
    own, expert = x[order.source // PER_TOKEN], expert[order.source]
    exact = torch.einsum("rk,rok->ro", own, dense(weight)[expert])
    tile = GroupedTile(8, 32, step, 2, 2, steps=2 if width > 80 else 1)
    if width == 80:  # neither fetched nor gated
        close(grouped_product(own, weight, order.ends, tile=tile), exact)
    fetched = {"source": order.source, "per_token": PER_TOKEN, "gated": True, "bias": bias, "clamp": CLAMP}
    gate, up = (exact + bias[expert]).chunk(2, -1)
    close(grouped_product(x, weight, order.ends, **fetched, tile=tile), clamped_swiglu(gate, up, CLAMP))


# Activations likewise, a step of 128 columns; of widths that it divides or does not.
ROUNDED: tuple[tuple[Scheme, int, bool], ...] = (
    (Scheme("int8", 1, 0, "row"), 128, True),
    (Scheme("e4m3", 1, 0, "row"), 144, False),
    (Scheme("e4m3", 32, 128, "block"), 256, True),
    (Scheme("int8", 32, 128, "block"), 128, False),
)


def rounded(weight: QuantizedWeight, turned: bool) -> None:
    chosen = torch.rand(TOKENS, COUNT - 1).argsort(1)[:, :PER_TOKEN].contiguous()
    order, (_, both, width) = Order.of(chosen, COUNT), weight.shape
    bias, expert = torch.randn(COUNT, both), chosen.flatten()[order.source]
    values, scales = round_rows.reference(torch.randn(TOKENS, width), weight.kind, weight.columns)
    own = (values.float() * spread(scales, weight.scheme._replace(rows=1), values.shape))[order.source // PER_TOKEN]
    exact = torch.einsum("rk,rok->ro", own, dense(weight)[expert])
    tile = GroupedTile(16, 32, 128, 4, 2, turned)
    if weight.columns == 0:
        rows = values[order.source // PER_TOKEN], scales[order.source // PER_TOKEN]
        close(grouped_product(rows[0], weight, order.ends, x_scales=rows[1], dtype=torch.float32, tile=tile), exact)
    fetched = {"source": order.source, "per_token": PER_TOKEN, "gated": True, "bias": bias, "clamp": CLAMP}
    gate, up = (exact + bias[expert]).chunk(2, -1)
    found = grouped_product(values, weight, order.ends, x_scales=scales, dtype=torch.float32, **fetched, tile=tile)
    close(found, clamped_swiglu(gate, up, CLAMP))


@pytest.mark.parametrize(
    ("scheme", "tokens", "per_token", "hidden", "width"),
    [(Scheme("e4m3", 1, 0, "row"), 2, 3, 18, 12), (Scheme("int8", 1, 0), 1, 1, 16, 36)],
)
def test_few_tokens_of_packed_experts(scheme: Scheme, tokens: int, per_token: int, hidden: int, width: int) -> None:
    """Of a token without one of its experts and of one that is NaN, too."""
    count, parts = per_token + 2, (ChoiceTile(8, 16, 4), ChoiceTile(4, 16, 4))
    chosen = torch.rand(tokens, count).argsort(1)[:, :per_token].contiguous()
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, per_token)
    gate_up, down = (pack(torch.randn(count, *size) / 8, scheme) for size in ((2 * width, hidden), (hidden, width)))
    given = chosen, *(part._replace(activations="") for part in (gate_up, down))
    biases = torch.randn(count, 2 * width), torch.randn(count, hidden)
    x[-1, 0] = torch.nan if tokens > 1 else 0.0
    wanted = biased_experts.reference(x, weights, *given, *biases, CLAMP)
    close(by_choices(BiasedExpertsCall(x, weights, chosen, gate_up, down, *biases, CLAMP), parts), wanted)
    chosen[0, -1] = -1
    for factors in (weights, *(None,) * (per_token == 1)):
        wanted = experts.reference(x, factors, *given, tokens * per_token - 1)
        close(by_choices(ExpertsCall(x, factors, chosen, gate_up, down), parts), wanted)


def close(found: Tensor, wanted: Tensor) -> None:
    atol = 2e-5 * wanted.nan_to_num().abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("scheme", "width", "step"), CASES, ids=str)
def test_packed_products(scheme: Scheme, width: int, step: int) -> None:
    packed = pack(torch.randn(COUNT, 48, width) / 8, scheme)
    for weight in (packed, with_zeros(packed)) if scheme.values == "int4" else (packed,):
        quantized_product(weight, step)


@pytest.mark.parametrize(("scheme", "width", "turned"), ROUNDED, ids=str)
def test_rounded_products(scheme: Scheme, width: int, turned: bool) -> None:
    rounded(pack(torch.randn(COUNT, 64, width) / 8, scheme), turned)
