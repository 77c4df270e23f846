"""The Triton kernels of packed experts in Triton's interpreter, against references: run by `interpreted`.

In float32: the interpreter computes nothing in bfloat16, and knows no assembly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp, clamped_swiglu
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.experts import biased_experts, experts
from strata.kernels.moe.few_tokens import ChoiceTile, by_choices
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.grouped_tiles import GroupedTile
from strata.kernels.moe.order import Order
from strata.kernels.quant.packed import PackedWeight, Scheme, dense, pack, spread
from strata.kernels.quant.round_rows import round_rows

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


def with_zeros(weight: PackedWeight) -> PackedWeight:
    return weight._replace(zeros=torch.randint(0, 16, weight.scales.shape, dtype=torch.uint8))


def products(weight: PackedWeight, step: int) -> None:
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


def rounded(weight: PackedWeight, turned: bool) -> None:
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
    fetched |= {"x_scales": scales, "dtype": torch.float32}
    found = grouped_product(values, weight, order.ends, **fetched, tile=tile)
    close(found, clamped_swiglu(gate, up, CLAMP))


def few_tokens(scheme: Scheme, tokens: int, per_token: int, hidden: int, width: int) -> None:
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


def packed_products() -> None:
    for scheme, width, step in CASES:
        packed = pack(torch.randn(COUNT, 48, width) / 8, scheme)
        for weight in (packed, with_zeros(packed)) if scheme.values == "int4" else (packed,):
            products(weight, step)
    few_tokens(Scheme("e4m3", 1, 0, "row"), 2, 3, 18, 12)
    few_tokens(Scheme("int8", 1, 0), 1, 1, 16, 36)
    for scheme, width, turned in ROUNDED:
        rounded(pack(torch.randn(COUNT, 64, width) / 8, scheme), turned)
