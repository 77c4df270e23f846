"""Experts with packed weights on CUDA against float64 over what each weight stands for: every kind, tile and way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.experts import CHOICES, CONVERTED, FROZEN, ROUNDED, biased_experts, experts, local_experts
from strata.kernels.moe.grouped import GroupedTile, choose_tile, fitting, grouped_product
from strata.kernels.moe.local_order import Order
from strata.kernels.moe.small_m import QUANTIZED_TILES, ChoiceTile, by_choices
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, dense, pack, spread
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES
from tests.gpu.tensors import assert_a_chain_waits, assert_near, assert_within, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# Beside those that users can name: what ranks, other groups and merges leave of them.
OTHERS = {
    "a scale an expert": Scheme("e4m3", 0, 0),
    "rows of blocks": Scheme("e4m3", 1, 128, "block"),
    "halves of groups": Scheme("int4", 1, 64),
    "int4 by rows": Scheme("int4", 1, 0),
    "halves of mxfp4": Scheme("e2m1", 1, 8),
}
ALL = dict(SCHEMES) | OTHERS
CLAMP = Clamp(1.702, 7.0)


def draw_weight(count: int, out: int, width: int, scheme: Scheme) -> QuantizedWeight:
    """On the device: to pack 128 experts takes a core of the host ten seconds."""
    weight = torch.randn(count, out, width, device="cuda") * torch.randn(count, out, 1, device="cuda").exp()
    weight *= width**-0.5
    if scheme.columns == 8:  # powers of two, as of mxfp4
        packed = pack(weight, scheme._replace(columns=32))
        return packed._replace(scales=packed.scales.repeat_interleave(4, -1), columns=8)
    return pack(weight, scheme)


def with_zeros(weight: QuantizedWeight, kind: torch.dtype = torch.uint8) -> QuantizedWeight:
    return weight._replace(zeros=torch.randint(0, 16, weight.scales.shape, device="cuda").to(kind))


def uneven(tokens: int, count: int, per_token: int) -> Tensor:
    """Choices of which the last expert has none, and the first many."""
    logits = torch.randn(tokens, count, device="cuda")
    logits[:, -1], logits[: tokens // 2, 0] = -100, 100
    return logits.topk(per_token).indices


def tiles(weight: QuantizedWeight, gated: bool) -> list[GroupedTile]:
    """Those of the rule for any number of rows."""
    count = weight.shape[0]
    found = (choose_tile(each * count, weight, gated=gated) for each in (1, 8, 20, 40, 200))
    return [fitting(tile, weight, gated=gated) for tile in found if tile is not None]


def exact_product(rows: Tensor, weight: QuantizedWeight, order: Order, bias: Tensor) -> Tensor:
    """Of rows in the order of their experts, in float64."""
    plain, spans = dense(weight).double(), enumerate(pairwise([0, *order.ends.tolist()]))
    return torch.cat([rows[start:end] @ plain[one].t() + bias[one].double() for one, (start, end) in spans])


def clamped(exact: Tensor) -> Tensor:
    gate, up = exact.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP.limit), up.clamp(-CLAMP.limit, CLAMP.limit)
    return (up + 1) * gate * torch.sigmoid(CLAMP.alpha * gate)


@pytest.mark.parametrize(
    ("name", "out", "width"),
    [(name, 136, 544) for name in ALL] + [(name, 256, 1024) for name in ("fp8", "fp8_block", "int4", "mxfp4")],
)
def test_products_in_every_tile(name: str, out: int, width: int) -> None:
    """Of experts without rows, with some and with more than a tile holds, of widths that steps divide or do not."""
    count, per_token, tokens = 6, 2, 200
    weight = draw_weight(count, 2 * out, width, ALL[name])
    order = Order.of(uneven(tokens, count, per_token), count)
    x, bias = draw(tokens, 2 * width)[:, width:], draw(count, 2 * out)
    rows = x[order.source // per_token]
    exact = exact_product(rows.double(), weight, order, bias)
    for tile in tiles(weight, gated=False):
        assert_near(grouped_product(rows, weight, order.ends, bias=bias, tile=tile), exact)
    fetched: dict[str, Any] = {"source": order.source, "per_token": per_token, "gated": True, "bias": bias}
    for tile in tiles(weight, gated=True):
        assert_near(grouped_product(x, weight, order.ends, **fetched, clamp=CLAMP, tile=tile), clamped(exact))


@pytest.mark.parametrize(
    ("name", "out", "width"),
    [
        (name, out, width)
        for name in ("fp8", "int8", "fp8_block", "rows of blocks")
        for out, width in ((136, 544), (256, 1024))
    ],
)
def test_products_in_8_bits_in_every_tile(name: str, out: int, width: int) -> None:
    count, per_token, tokens = 6, 2, 200
    weight = draw_weight(count, 2 * out, width, ALL[name])
    order = Order.of(uneven(tokens, count, per_token), count)
    bias, token = draw(count, 2 * out), order.source // per_token
    values, scales = round_rows(draw(tokens, width), weight.kind, weight.columns)
    wide = values.double() * spread(scales, weight.scheme._replace(rows=1), values.shape)
    exact = exact_product(wide[token], weight, order, bias)
    # Sums of products of 8-bit floats have some 14 bits, within a block.
    bound = {"fp8": 1e-2, "int8": 2e-3}.get(name, 5e-3)
    fetched: dict[str, Any] = {"source": order.source, "per_token": per_token, "gated": True, "clamp": CLAMP}
    for each in (4, 20, 40, 200):
        for gated in (False, True):
            tile = choose_tile(each * count, weight, gated=gated, rounded=True)
            rows = (values, scales) if gated else (values[token], scales[token])
            more: dict[str, Any] = fetched if gated else {}
            found = grouped_product(
                rows[0], weight, order.ends, x_scales=rows[1], dtype=torch.bfloat16, bias=bias, tile=tile, **more
            )
            assert_within(found, clamped(exact) if gated else exact, bound)


def given(name: str, tokens: int, count: int, per_token: int, hidden: int, width: int) -> list[Any]:
    weights = torch.rand(tokens, per_token, device="cuda")
    gate_up = draw_weight(count, 2 * width, hidden, ALL[name])
    down = draw_weight(count, hidden, width, ALL[name])
    return [draw(tokens, hidden), weights, uneven(tokens, count, per_token), gate_up, down]


def in_float64(arguments: list[Any]) -> list[Any]:
    """The weights in floats, so that no activation is rounded."""

    def wide(one: Any) -> Any:
        plain = dense(one) if isinstance(one, QuantizedWeight) else one
        return plain.double() if isinstance(plain, Tensor) and plain.is_floating_point() else plain

    return [wide(one) for one in arguments]


# What rounding between the products leaves; in 8 bits some of what is gated goes to the next value, as its 16 bits do.
BOUNDS = {CHOICES: 5e-3, ROUNDED: 2e-2, CONVERTED: 5e-3, FROZEN: 1e-2}


def assert_right(operation: Any, arguments: list[Any], name: str) -> None:
    """As the reference: of activations in 8 bits in float32, of others in float64."""
    chosen = operation.bind("cuda", packed=True).choose(*arguments)
    assert chosen.name == name
    result = chosen.run(*operation.call_args(*arguments))
    if name == ROUNDED:
        exact = operation.reference(arguments[0].float(), *arguments[1:])
    else:
        exact = operation.reference(*in_float64(arguments))
    assert_within(result, exact, BOUNDS[name])
    assert torch.equal(chosen.run(*operation.call_args(*arguments)), result)


def way(name: str, tokens: int, per_token: int, count: int) -> str:
    """By the rule, of `experts` and `biased_experts`."""
    kind, rows, columns, _ = ALL[name]
    if tokens == 1 and kind in ("e4m3", "int8") and (rows, columns) == (1, 0):
        return CHOICES
    rounds = ALL[name].activations and ALL[name].columns in (0, 128)
    return ROUNDED if rounds and tokens * per_token > 2 * count else CONVERTED


@pytest.mark.parametrize(
    ("name", "tokens", "count", "per_token", "hidden", "width"),
    [(name, tokens, 6, 2, 544, 192) for name in ALL for tokens in (0, 1, 3, 64, 300)]
    # No larger: several workers hold these in float64 at once.
    + [(name, tokens, 128, 8, 1024, 256) for name in ("fp8", "fp8_block", "int8", "mxfp4") for tokens in (1, 64, 1000)],
)
def test_experts(name: str, tokens: int, count: int, per_token: int, hidden: int, width: int) -> None:
    arguments = given(name, tokens, count, per_token, hidden, width)
    if tokens:
        assert_right(experts, arguments, way(name, tokens, per_token, count))
    assert experts(*arguments).shape == (tokens, hidden)


@pytest.mark.parametrize(("tokens", "rounded"), [(2, False), (6, False), (7, True)])
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8"])
def test_rows_are_rounded_of_more_than_two_an_expert(name: str, tokens: int, rounded: bool) -> None:
    assert_right(experts, given(name, tokens, 6, 2, 512, 256), ROUNDED if rounded else CONVERTED)


def test_rows_are_rounded_with_a_scale_that_was_found_ahead() -> None:
    *arguments, gate_up, down = given("fp8", 64, 6, 2, 512, 256)
    static = [*arguments, gate_up._replace(input_scale=0.01), down._replace(input_scale=0.03)]
    assert_right(experts, static, ROUNDED)
    by_rows = experts.bind("cuda", packed=True)(*arguments, gate_up, down)
    assert not torch.equal(experts.bind("cuda", packed=True)(*static), by_rows)


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("parts", [QUANTIZED_TILES, (ChoiceTile(8, 512, 4), ChoiceTile(4, 128, 8))])
@pytest.mark.parametrize(
    ("tokens", "per_token", "hidden", "width"), [(1, 8, 2048, 768), (1, 4, 2880, 1441), (3, 3, 99, 41)]
)
def test_choices(
    name: str, parts: tuple[ChoiceTile, ChoiceTile], tokens: int, per_token: int, hidden: int, width: int
) -> None:
    """Of sizes that blocks divide or do not, with bounds and biases, and where a token lacks an expert."""
    count, bound = 16, BOUNDS[CHOICES]
    arguments = given(name, tokens, count, per_token, hidden, width)
    biases = draw(count, 2 * width) / 4, draw(count, hidden) / 4
    found = by_choices(BiasedExpertsCall(*arguments, *biases, CLAMP), parts)
    exact = biased_experts.reference(*in_float64([*arguments, *biases]), CLAMP)
    assert_within(found, exact, bound)
    arguments[2][0, -1] = -1
    found = by_choices(ExpertsCall(*arguments), parts)
    exact = experts.reference(*in_float64(arguments), tokens * per_token - 1)
    assert_within(found, exact, bound)


def test_tokens_with_fewer_experts_and_columns_in_an_order_of_their_own() -> None:
    arguments = given("int4", 33, 6, 2, 512, 256)
    for place, width in ((3, 512), (4, 256)):
        weight = with_zeros(arguments[place], (torch.uint8, torch.bfloat16)[place - 3])
        arguments[place] = weight._replace(order=torch.randperm(width, device="cuda").int())
    kept = torch.rand(33, 2, device="cuda") < 0.5
    arguments[2] = arguments[2].where(kept, -1)
    arguments.append(int(kept.sum()))
    assert_right(experts, arguments, CONVERTED)


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 64, 256])
def test_biased_experts(name: str, tokens: int) -> None:
    """Of the width of gpt-oss-20b, which no step divides."""
    arguments = given(name, tokens, 8, 4, 2880 if name != "int4" else 2816, 1440 if name != "int4" else 1408)
    arguments += [draw(8, 2 * arguments[4].shape[2]), draw(8, arguments[4].shape[1]), CLAMP]
    arguments[5], arguments[6] = arguments[5] / 4, arguments[6] / 4
    for adds in (True, False):
        assert_right(biased_experts, [*arguments, adds], way(name, tokens, 4, 8))


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "fp8_block"])
@pytest.mark.parametrize("tokens", [2, 130])
def test_a_ranks_part(name: str, tokens: int) -> None:
    count, first, held = 12, 4, 3
    arguments = given(name, tokens, count, 2, 512, 256)
    for place in (3, 4):
        whole = arguments[place]
        fields = {field: one[first : first + held].contiguous() for field, one in whole.tensors.items()}
        arguments[place] = whole.with_tensors(fields)
    mapping = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    mapping[-1] = -1
    arguments += [first, count, None, mapping]
    assert_right(local_experts, arguments, way(name, tokens, 2, held))


def test_what_no_kernel_reads_is_served_in_floats() -> None:
    arguments = given("fp8", 5, 6, 2, 512, 192)
    arguments[3] = draw_weight(6, 384, 512, Scheme("int4", 1, 24))
    assert_right(experts, arguments, FROZEN)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_recorded_layers_give_the_same_bits(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # to poison the results would put kernels between the launches
    layers = [tuple(given(name, tokens, 16, 4, 512, 256)[1:]) for _ in range(3)]
    assert_a_chain_waits(experts.bind("cuda", packed=True), draw(tokens, 512), layers)
