"""Products fused with halves of a norm, against float64: every tile that tuning may choose, and chains of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.replay import time_replayed
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.skinny import SkinnyProduct, multiply
from strata.kernels.linear.skinny_candidates import candidates, variants
from strata.kernels.linear.skinny_tiles import IMPLEMENTATION, SkinnyTile
from strata.kernels.split_counters import split_counters

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Of the 0.6B and of the 8B shape: hidden, inner, and the width of the attention's result.
HIDDEN, INNER, ATTENTION = 1024, 3072, 2048
LARGE_HIDDEN, LARGE_INNER = 4096, 14336
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def draw_weight(out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(out, width, device="cuda") * width**-0.5).to(dtype)


def assert_near(result: Tensor, exact: Tensor) -> None:
    """One rounding to the dtype, beside what sums in float32 lose."""
    assert result.isfinite().all()
    rtol = 0.55 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=1e-4 * exact.abs().max().item())


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def check_add(rows: int, out: int, width: int, bias: Tensor | None, tile: SkinnyTile) -> None:
    x, residual = draw(rows, 2 * width)[:, width:], draw(rows, out + 24)[:, 8 : out + 8]
    weight, norm_weight = draw_weight(out, width), draw(out)
    product = SkinnyProduct(x, weight, bias, residual=residual, norm_weight=norm_weight)
    total, weighted, squares = multiply(product, tile)
    assert_near(total, exact_linear(x, weight, bias) + residual.double())
    assert torch.equal(weighted, total * norm_weight)
    assert squares.shape == (rows, -(-out // tile.columns))
    torch.testing.assert_close(squares.double().sum(-1), total.double().square().sum(-1), rtol=1e-5, atol=0)
    for one, other in zip(multiply(product, tile), (total, weighted, squares), strict=True):
        assert torch.equal(one, other), f"{tile} gives other bits the second time"


def scaled(call: SkinnyProduct) -> Tensor:
    """In float64."""
    assert call.squares is not None
    scale = torch.rsqrt(call.squares.double().sum(-1, keepdim=True) / call.x.shape[1] + call.eps)
    product = exact_linear(call.x, call.weight, None) * scale
    return product if call.bias is None else product + call.bias.double()


def check_scaled(rows: int, out: int, width: int, bias: Tensor | None, tile: SkinnyTile, blocks: int) -> None:
    squares = torch.rand(rows, blocks, device="cuda") * (2 * width / blocks)
    call = SkinnyProduct(draw(rows, width), draw_weight(out, width), bias, squares, EPS)
    (result,) = multiply(call, tile)
    assert_near(result, scaled(call))
    assert torch.equal(multiply(call, tile)[0], result), f"{tile} gives other bits the second time"


def check_gated(rows: int, out: int, width: int, bias: Tensor | None, tile: SkinnyTile, blocks: int) -> None:
    squares = torch.rand(rows, blocks, device="cuda") * (2 * width / blocks)
    call = SkinnyProduct(draw(rows, width), draw_weight(out, width), bias, squares, EPS, gated=True)
    (result,) = multiply(call, tile)
    gate, up = scaled(call).chunk(2, -1)
    assert_near(result, F.silu(gate) * up)
    assert torch.equal(multiply(call, tile)[0], result), f"{tile} gives other bits the second time"


def sizes_of(bucket: int) -> set[int]:
    return {bucket, bucket // 2 + 1}


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(("out", "width"), [(HIDDEN, ATTENTION), (HIDDEN, INNER), (LARGE_HIDDEN, LARGE_INNER)])
def test_linear_add_in_every_tile(out: int, width: int, bucket: int) -> None:
    for tile in candidates("linear_add", bucket, out, width):
        for rows in sizes_of(bucket):
            check_add(rows, out - 16, width, None, tile)
    assert not split_counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(("out", "width"), [(4096, HIDDEN), (6144, LARGE_HIDDEN)])
def test_scaled_linear_in_every_tile(out: int, width: int, bucket: int) -> None:
    for tile in candidates("scaled_linear", bucket, out, width):
        for rows in sizes_of(bucket):
            check_scaled(rows, out - 16, width, None, tile, blocks=width // (4 if rows <= 2 else 64))
    assert not split_counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(("inner", "width"), [(INNER, HIDDEN), (LARGE_INNER, LARGE_HIDDEN)])
def test_gated_product_in_every_tile(inner: int, width: int, bucket: int) -> None:
    for tile in candidates("scaled_linear_silu_mul", bucket, 2 * inner, width):
        for rows in sizes_of(bucket):
            check_gated(rows, 2 * inner - 32, width, None, tile, blocks=width // (4 if rows <= 2 else 64))
    assert not split_counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("out", [1, 17, 995])
@pytest.mark.parametrize("rows", [1, 4, 9, 150])
def test_odd_columns_and_biases(rows: int, out: int) -> None:
    for tile in candidates("linear_add", rows, HIDDEN, ATTENTION)[:4]:
        check_add(rows, out, ATTENTION, draw(out), tile)
        check_scaled(rows, out, ATTENTION, draw(out), tile, blocks=5)
        check_gated(rows, 2 * out, ATTENTION, draw(2 * out), tile, blocks=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 30, 200, 300])
def test_operations_are_their_references(rows: int, dtype: torch.dtype) -> None:
    """By the registry, whatever tile or fallback it takes."""
    x, residual, norm_weight = draw(rows, 256, dtype=dtype), draw(rows, 320, dtype=dtype), draw(320, dtype=dtype)
    weight = draw_weight(320, 256, dtype)
    given = (x, weight, None, residual, norm_weight)
    chosen = linear_add.bind("cuda").choose(*given)
    assert (chosen.name == IMPLEMENTATION) == (rows <= 256)
    total, weighted, squares = linear_add(*given)
    loose = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0.02}
    for one, other in zip((total, weighted), linear_add.reference(*given), strict=False):
        torch.testing.assert_close(one, other, **loose)
    for operation in (scaled_linear, scaled_linear_silu_mul):
        second = draw_weight(192, 320, dtype)
        following = (weighted, squares, EPS, second, draw(192, dtype=dtype))
        torch.testing.assert_close(operation(*following), operation.reference(*following), **loose)


def test_shapes_that_no_tile_fits_take_the_reference() -> None:
    x, weight, residual, norm_weight = draw(3, 40), draw(24, 40), draw(3, 24), draw(24)
    assert linear_add.bind("cuda").choose(x, weight, None, residual, norm_weight).name == "reference"
    total, weighted, squares = linear_add(x, weight, None, residual, norm_weight)
    wide = scaled_linear(weighted, squares, EPS, draw(16, 24), None)
    assert total.isfinite().all()
    assert wide.shape == (3, 16)


def layers(count: int, rows: int) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    weights = [
        (
            draw_weight(ATTENTION, HIDDEN),
            draw_weight(HIDDEN, ATTENTION),
            draw(HIDDEN).abs() + 0.5,
            draw_weight(2 * INNER, HIDDEN),
            draw_weight(HIDDEN, INNER),
            draw(HIDDEN).abs() + 0.5,
        )
        for _ in range(count)
    ]
    return draw(rows, HIDDEN), weights


Choose = Callable[[str, Tensor, Tensor], SkinnyTile]


def run_layers(x: Tensor, weights: list[tuple[Tensor, ...]], choose: Choose) -> Tensor:
    """Layers without attention in four launches each, every one of which reads what the one before it wrote."""

    def call(operation: str, x: Tensor, weight: Tensor, **beside: Any) -> tuple[Tensor, ...]:
        return multiply(SkinnyProduct(x, weight, **beside), choose(operation, x, weight))

    total, weighted, squares = x, x, x.float().square().sum(-1, keepdim=True)
    for qkv, o, first_norm, gate_up, down, second_norm in weights:
        (mixed,) = call("scaled_linear", weighted, qkv, squares=squares, eps=EPS)
        total, weighted, squares = call("linear_add", mixed, o, residual=total, norm_weight=first_norm)
        (inner,) = call("scaled_linear_silu_mul", weighted, gate_up, squares=squares, eps=EPS, gated=True)
        total, weighted, squares = call("linear_add", inner, down, residual=total, norm_weight=second_norm)
    return total


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_early_launches_in_a_graph_read_what_the_launch_before_wrote(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # to poison the results would put kernels between the launches
    x, weights = layers(4, rows)

    def tile(operation: str, x: Tensor, weight: Tensor, at: int, variant: int) -> SkinnyTile:
        found = candidates(operation, len(x), *weight.shape)
        chosen = variants(operation, found[at % len(found)])
        return chosen[variant % len(chosen)]

    for at in range(4):
        for variant in range(3):

            def early(operation: str, x: Tensor, weight: Tensor, at: int = at, variant: int = variant) -> SkinnyTile:
                return tile(operation, x, weight, at, variant)

            def late(operation: str, x: Tensor, weight: Tensor, at: int = at) -> SkinnyTile:
                return replace(tile(operation, x, weight, at, 0), early=False)

            results: list[Tensor] = []

            def chain(choose: Choose = early, into: list[Tensor] = results) -> None:
                into.append(run_layers(x, weights, choose))

            time_replayed([chain], repeats=10)
            plain = run_layers(x, weights, late)
            for result in (results[0], results[-1]):  # run eagerly, and as the last replay left it
                assert torch.equal(result, plain), f"candidate {at}, variant {variant} read too soon"
    assert not split_counters(x.device).any()


def test_fused_layers_are_as_exact_as_separate_ones() -> None:
    x, weights = layers(3, 16)

    def tile(operation: str, x: Tensor, weight: Tensor) -> SkinnyTile:
        return candidates(operation, len(x), *weight.shape)[0]

    def separate(total: Tensor, weights: list[tuple[Tensor, ...]]) -> Tensor:
        normed = F.rms_norm(total, (HIDDEN,), eps=EPS)
        for qkv, o, first_norm, gate_up, down, second_norm in weights:
            total = total + F.linear(F.linear(normed, qkv), o)
            gate, up = F.linear(F.rms_norm(total, (HIDDEN,), eps=EPS) * first_norm, gate_up).chunk(2, -1)
            total = total + F.linear(F.silu(gate) * up, down)
            normed = F.rms_norm(total, (HIDDEN,), eps=EPS) * second_norm
        return total

    exact = separate(x.double(), [tuple(weight.double() for weight in layer) for layer in weights])
    error = (run_layers(x, weights, tile).double() - exact).square().mean()
    assert error <= 1.1 * (separate(x, weights).double() - exact).square().mean()
