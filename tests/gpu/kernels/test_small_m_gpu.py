"""Products of few rows against float64, in every tile that tuning may choose, alone and fused with halves of a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import IMPLEMENTATION, MAX_ROWS, SmallMTile, candidates, device_tiles, variants
from strata.kernels.linear.tile_rule import chosen_tile, expected_tile
from strata.kernels.split_counters import split_counters
from strata.kernels.tuned import row_bucket
from tests.gpu.tensors import assert_near, assert_replays_have_the_bits_of, draw, exact_linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# Weights [out, width]: of the 0.6B shape, and the long rows of the 8B shape.
SHAPES = ((1024, 2048), (1024, 3072), (6144, 1024), (4096, 14336))
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def tiles(out: int, width: int) -> list[SmallMTile]:
    return sorted({tile for rows in BUCKETS for tile in candidates("linear", rows, out, width)}, key=str)


def small_m_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: SmallMTile) -> Tensor:
    """`linear` of x [..., width] with a tile."""
    (result,) = multiply(SmallMProduct(x.reshape(-1, x.shape[-1]), weight, bias), tile)
    return result.view(*x.shape[:-1], weight.shape[0])


def assert_right(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert result.dtype == x.dtype
    assert_near(result, exact_linear(x, weight, bias), 5e-5)


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_every_tile_in_every_bucket(out: int, width: int) -> None:
    out -= 16  # fills no tile
    weight, bias = draw(out, width), draw(out)
    for bucket in BUCKETS:
        for rows in {bucket, bucket // 2 + 1}:
            x = draw(rows, width)
            for tile in candidates("linear", bucket, out, width):
                assert_right(small_m_linear(x, weight, bias, tile), x, weight, bias)
    assert not split_counters(weight.device).any()


@pytest.mark.parametrize("out", [1, 15, 16, 17, 63, 129, 1000])
def test_columns_that_do_not_fill_a_tile(out: int) -> None:
    weight = draw(out, 2048)
    for tile in tiles(1024, 2048):
        x = draw(4 if tile.kernel == "gemv" else 30, 2048)
        assert_right(small_m_linear(x, weight, None, tile), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_operands(dtype: torch.dtype) -> None:
    weight = draw(300, 4096 + 64, dtype=dtype)[:, 32 : 32 + 4096]
    for rows in (1, 8, 30, 200):
        x = draw(rows, 3 * 4096, dtype=dtype)[:, 4096:8192]
        for tile in candidates("linear", row_bucket(rows), 4096, 4096):
            assert_right(small_m_linear(x, weight, None, tile), x, weight, None)


def test_leading_dimensions_and_no_rows() -> None:
    weight, tile = draw(96, 1024), SmallMTile("dot", 64, 128, 4, 4, 2)
    x = draw(3, 5, 1024)
    assert_right(small_m_linear(x, weight, None, tile), x, weight, None)
    assert_right(small_m_linear(x[0, 0], weight, None, tile), x[0, 0], weight, None)
    assert small_m_linear(x[:0], weight, None, tile).shape == (0, 5, 96)


@pytest.mark.parametrize(("out", "width"), [(1024, 2048), (4096, 14336)])
def test_rows_stand_alone_in_one_tile(out: int, width: int) -> None:
    weight, x = draw(200, width), draw(MAX_ROWS, width)
    for tile in tiles(out, width):
        most = max(rows for rows in BUCKETS if tile in candidates("linear", rows, out, width))
        together = small_m_linear(x[:most], weight, None, tile)
        for rows in {*range(1, min(most, 5) + 1), most // 2 + 1, most}:
            chosen = torch.randint(0, most, (rows,), device="cuda")
            alone = small_m_linear(x[chosen], weight, None, tile)
            assert torch.equal(alone, together[chosen]), f"{tile}: other bits among {rows} rows"


def test_large_weight_past_the_reach_of_32_bits() -> None:
    weight = draw(1, 14336).expand(160_000, -1).contiguous()  # 2.3e9 elements
    weight[-1].mul_(2)
    x = draw(1, 14336)
    for tile in (SmallMTile("gemv", 4, 2048, 8), SmallMTile("dot", 64, 128, 4, 4)):
        result = small_m_linear(x, weight, None, tile)
        assert_right(result[:, -3:], x, weight[-3:], None)


def test_a_chain_of_early_launches_in_a_graph_reads_what_the_launch_before_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # to poison the results would put kernels between the launches
    weights = [draw(2048, 2048) * 2048**-0.5 for _ in range(6)]
    for rows in (4, 64):
        x = draw(rows, 2048)
        for found in candidates("linear", rows, 2048, 2048):
            late = replace(found, early=False)
            for tile in variants("linear", found):
                plain = x
                for weight in weights:
                    plain = small_m_linear(plain, weight, None, late)

                def chain(last: torch.Tensor = x, tile: SmallMTile = tile) -> torch.Tensor:
                    for weight in weights:
                        last = small_m_linear(last, weight, None, tile)
                    return last

                assert_replays_have_the_bits_of(chain, plain, 20, f"{tile} read too soon")
    assert not split_counters(x.device).any()


def test_what_the_kernels_cannot_load_is_refused() -> None:
    x, weight, tile = draw(1, 1024), draw(64, 1024), SmallMTile("gemv", 4, 1024, 4)
    for bad_x, bad_weight in (
        (draw(1, 1001), draw(64, 1001)),
        (x.float(), weight.float()),
        (draw(1, 1040)[:, 1:1025], weight),
        (x, draw(64, 1028)[:, :1024]),
        (draw(5, 1024), weight),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            small_m_linear(bad_x, bad_weight, None, tile)
        exact = exact_linear(bad_x, bad_weight)
        loose = {"rtol": 0.02, "atol": 0.02 * exact.abs().max().item()}
        torch.testing.assert_close(linear(bad_x, bad_weight).double(), exact, **loose)


@pytest.mark.parametrize(("out", "width"), [(999, 192), (5000, 896), (2560, 9728), (896, 4864), (1024, 2048)])
def test_tiles_of_shapes_that_were_not_measured(out: int, width: int) -> None:
    weight = draw(out, width)
    limits = DeviceLimits.of(weight.device)
    for rows in (1, 2, 3, 17, 64, 65, 256):
        operation = "linear" if rows <= thresholds(torch.device("cuda")).linear_rows else "scaled_linear"
        tile, x = expected_tile(operation, rows, out, width, limits), draw(rows, width)
        assert tile is not None
        assert_right(small_m_linear(x, weight, None, tile), x, weight, None)


def test_linear_takes_what_the_table_says() -> None:
    found = device_tiles(torch.device("cuda", torch.cuda.current_device()))
    bound = linear.bind("cuda")
    assert bound.choose(draw(1, 48), draw(7, 48), None).name == "cublas"
    for key, tile in found.items():
        if key.operation != "linear" or key.out * key.width > 1 << 27:
            continue
        x, weight = draw(key.rows, key.width), draw(key.out, key.width)
        assert chosen_tile("linear", x, weight) == tile
        if tile is None:
            continue
        assert bound.choose(x, weight, None).name == IMPLEMENTATION
        assert_right(bound(x, weight, None), x, weight, None)
        assert bound.choose(draw(2 * MAX_ROWS, key.width), weight, None).name != IMPLEMENTATION


# Of the 0.6B and of the 8B shape: hidden, inner, and the width of the attention's result.
HIDDEN, INNER, ATTENTION = 1024, 3072, 2048
LARGE_HIDDEN, LARGE_INNER = 4096, 14336
EPS = 1e-5


def draw_weight(out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(out, width, device="cuda") * width**-0.5).to(dtype)


def check_add(rows: int, out: int, width: int, bias: Tensor | None, tile: SmallMTile) -> None:
    x, residual = draw(rows, 2 * width)[:, width:], draw(rows, out + 24)[:, 8 : out + 8]
    weight, norm_weight = draw_weight(out, width), draw(out)
    product = SmallMProduct(x, weight, bias, residual=residual, norm_weight=norm_weight)
    total, weighted, squares = multiply(product, tile)
    assert_near(total, exact_linear(x, weight, bias) + residual.double())
    assert torch.equal(weighted, total * norm_weight)
    assert squares.shape == (rows, -(-out // tile.columns))
    torch.testing.assert_close(squares.double().sum(-1), total.double().square().sum(-1), rtol=1e-5, atol=0)
    for one, other in zip(multiply(product, tile), (total, weighted, squares), strict=True):
        assert torch.equal(one, other), f"{tile} gives other bits the second time"


def scaled(call: SmallMProduct) -> Tensor:
    """In float64."""
    assert call.squares is not None
    scale = torch.rsqrt(call.squares.double().sum(-1, keepdim=True) / call.x.shape[1] + call.eps)
    product = exact_linear(call.x, call.weight, None) * scale
    return product if call.bias is None else product + call.bias.double()


def check_scaled(
    rows: int, out: int, width: int, bias: Tensor | None, tile: SmallMTile, blocks: int, gated: bool = False
) -> None:
    squares = torch.rand(rows, blocks, device="cuda") * (2 * width / blocks)
    call = SmallMProduct(draw(rows, width), draw_weight(out, width), bias, squares, EPS, gated=gated)
    (result,) = multiply(call, tile)
    exact = scaled(call)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    assert_near(result, exact)
    assert torch.equal(multiply(call, tile)[0], result), f"{tile} gives other bits the second time"


EVERY = [
    *(("linear_add", out, width) for out, width in ((HIDDEN, ATTENTION), (HIDDEN, INNER), (LARGE_HIDDEN, LARGE_INNER))),
    *(("scaled_linear", out, width) for out, width in ((4096, HIDDEN), (6144, LARGE_HIDDEN))),
    *(("scaled_linear_silu_mul", 2 * inner, width) for inner, width in ((INNER, HIDDEN), (LARGE_INNER, LARGE_HIDDEN))),
]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize(("operation", "out", "width"), EVERY)
def test_every_tile_of_products_with_halves_of_norms(operation: str, out: int, width: int, bucket: int) -> None:
    gated = operation == "scaled_linear_silu_mul"
    for tile in candidates(operation, bucket, out, width):
        for rows in {bucket, bucket // 2 + 1}:
            if operation == "linear_add":
                check_add(rows, out - 16, width, None, tile)
            else:
                blocks = width // (4 if rows <= 2 else 64)
                check_scaled(rows, out - (32 if gated else 16), width, None, tile, blocks, gated)
    assert not split_counters(torch.device("cuda", torch.cuda.current_device())).any()


@pytest.mark.parametrize("out", [1, 17, 995])
@pytest.mark.parametrize("rows", [1, 4, 9, 150])
def test_odd_columns_and_biases(rows: int, out: int) -> None:
    for tile in candidates("linear_add", rows, HIDDEN, ATTENTION)[:4]:
        check_add(rows, out, ATTENTION, draw(out), tile)
        check_scaled(rows, out, ATTENTION, draw(out), tile, blocks=5)
        check_scaled(rows, 2 * out, ATTENTION, draw(2 * out), tile, blocks=1, gated=True)


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


Choose = Callable[[str, Tensor, Tensor], SmallMTile]


def run_layers(x: Tensor, weights: list[tuple[Tensor, ...]], choose: Choose) -> Tensor:
    """Layers without attention in four launches each, every one of which reads what the one before it wrote."""

    def call(operation: str, x: Tensor, weight: Tensor, **beside: Any) -> tuple[Tensor, ...]:
        return multiply(SmallMProduct(x, weight, **beside), choose(operation, x, weight))

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

    def tile(operation: str, x: Tensor, weight: Tensor, at: int, variant: int) -> SmallMTile:
        found = candidates(operation, len(x), *weight.shape)
        chosen = variants(operation, found[at % len(found)])
        return chosen[variant % len(chosen)]

    for at in range(4):
        for variant in range(3):

            def early(operation: str, x: Tensor, weight: Tensor, at: int = at, variant: int = variant) -> SmallMTile:
                return tile(operation, x, weight, at, variant)

            def late(operation: str, x: Tensor, weight: Tensor, at: int = at) -> SmallMTile:
                return replace(tile(operation, x, weight, at, 0), early=False)

            plain = run_layers(x, weights, late)
            message = f"candidate {at}, variant {variant} read too soon"
            assert_replays_have_the_bits_of(partial(run_layers, x, weights, early), plain, 10, message)
    assert not split_counters(x.device).any()


def test_fused_layers_are_as_exact_as_separate_ones() -> None:
    x, weights = layers(3, 16)

    def tile(operation: str, x: Tensor, weight: Tensor) -> SmallMTile:
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
