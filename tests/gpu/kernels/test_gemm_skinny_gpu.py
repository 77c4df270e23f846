"""The products of few rows against float64, in every tile that tuning may choose; and the table that chooses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from strata.hardware.replay import time_replayed
from strata.kernels.choose import thresholds
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.skinny import SkinnyProduct, multiply
from strata.kernels.linear.skinny_candidates import candidates, variants
from strata.kernels.linear.skinny_tiles import IMPLEMENTATION, MOST_ROWS, SkinnyTile, device_tiles
from strata.kernels.linear.tile_rule import chosen_tile, expected_tile
from strata.kernels.split_counters import split_counters
from strata.kernels.tuned import row_bucket

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# Weights [out, width]: of the 0.6B shape, and the long rows of the 8B shape.
SHAPES = ((1024, 2048), (1024, 3072), (6144, 1024), (4096, 14336))
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def tiles(out: int, width: int) -> list[SkinnyTile]:
    return sorted({tile for rows in BUCKETS for tile in candidates("linear", rows, out, width)}, key=str)


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: SkinnyTile) -> torch.Tensor:
    """`linear` of x [..., width] with a tile."""
    (result,) = multiply(SkinnyProduct(x.reshape(-1, x.shape[-1]), weight, bias), tile)
    return result.view(*x.shape[:-1], weight.shape[0])


def assert_right(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """One rounding to the dtype, beside what sums in float32 lose."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert result.dtype == x.dtype
    assert result.isfinite().all()
    rtol = 0.55 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=rtol, atol=5e-5 * exact.abs().max().item())


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_every_tile_in_every_bucket(out: int, width: int) -> None:
    out -= 16  # fills no tile
    weight, bias = draw(out, width), draw(out)
    for bucket in BUCKETS:
        for rows in {bucket, bucket // 2 + 1}:
            x = draw(rows, width)
            for tile in candidates("linear", bucket, out, width):
                assert_right(skinny_linear(x, weight, bias, tile), x, weight, bias)
    assert not split_counters(weight.device).any()


@pytest.mark.parametrize("out", [1, 15, 16, 17, 63, 129, 1000])
def test_columns_that_do_not_fill_a_tile(out: int) -> None:
    weight = draw(out, 2048)
    for tile in tiles(1024, 2048):
        x = draw(4 if tile.kernel == "gemv" else 30, 2048)
        assert_right(skinny_linear(x, weight, None, tile), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_operands(dtype: torch.dtype) -> None:
    weight = draw(300, 4096 + 64, dtype=dtype)[:, 32 : 32 + 4096]
    for rows in (1, 8, 30, 200):
        x = draw(rows, 3 * 4096, dtype=dtype)[:, 4096:8192]
        for tile in candidates("linear", row_bucket(rows), 4096, 4096):
            assert_right(skinny_linear(x, weight, None, tile), x, weight, None)


def test_leading_dimensions_and_no_rows() -> None:
    weight, tile = draw(96, 1024), SkinnyTile("dot", 64, 128, 4, 4, 2)
    x = draw(3, 5, 1024)
    assert_right(skinny_linear(x, weight, None, tile), x, weight, None)
    assert_right(skinny_linear(x[0, 0], weight, None, tile), x[0, 0], weight, None)
    assert skinny_linear(x[:0], weight, None, tile).shape == (0, 5, 96)


@pytest.mark.parametrize(("out", "width"), [(1024, 2048), (4096, 14336)])
def test_rows_stand_alone_in_one_tile(out: int, width: int) -> None:
    weight, x = draw(200, width), draw(MOST_ROWS, width)
    for tile in tiles(out, width):
        most = max(rows for rows in BUCKETS if tile in candidates("linear", rows, out, width))
        together = skinny_linear(x[:most], weight, None, tile)
        for rows in {*range(1, min(most, 5) + 1), most // 2 + 1, most}:
            chosen = torch.randint(0, most, (rows,), device="cuda")
            alone = skinny_linear(x[chosen], weight, None, tile)
            assert torch.equal(alone, together[chosen]), f"{tile}: other bits among {rows} rows"


def test_large_weight_past_the_reach_of_32_bits() -> None:
    weight = draw(1, 14336).expand(160_000, -1).contiguous()  # 2.3e9 elements
    weight[-1].mul_(2)
    x = draw(1, 14336)
    for tile in (SkinnyTile("gemv", 4, 2048, 8), SkinnyTile("dot", 64, 128, 4, 4)):
        result = skinny_linear(x, weight, None, tile)
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
                plain, early = x, []
                for weight in weights:
                    plain = skinny_linear(plain, weight, None, late)

                def chain(x: torch.Tensor = x, tile: SkinnyTile = tile, into: list[torch.Tensor] = early) -> None:
                    for weight in weights:
                        x = skinny_linear(x, weight, None, tile)
                    into.append(x)

                time_replayed([chain], repeats=20)
                for result in (early[0], early[-1]):  # run eagerly, and as the last replay left it
                    assert torch.equal(result, plain), f"{tile} read too soon"
    assert not split_counters(x.device).any()


def test_what_the_kernels_cannot_load_is_refused() -> None:
    x, weight, tile = draw(1, 1024), draw(64, 1024), SkinnyTile("gemv", 4, 1024, 4)
    for bad_x, bad_weight in (
        (draw(1, 1001), draw(64, 1001)),
        (x.float(), weight.float()),
        (draw(1, 1040)[:, 1:1025], weight),
        (x, draw(64, 1028)[:, :1024]),
        (draw(5, 1024), weight),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            skinny_linear(bad_x, bad_weight, None, tile)
        assert_right_by_linear(bad_x, bad_weight)


def assert_right_by_linear(x: torch.Tensor, weight: torch.Tensor) -> None:
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(linear(x, weight).double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize(("out", "width"), [(999, 192), (5000, 896), (2560, 9728), (896, 4864), (1024, 2048)])
def test_tiles_of_shapes_that_were_not_measured(out: int, width: int) -> None:
    weight = draw(out, width)
    limits = DeviceLimits.of(weight.device)
    for rows in (1, 2, 3, 17, 64, 65, 256):
        operation = "linear" if rows <= thresholds(torch.device("cuda")).linear_rows else "scaled_linear"
        tile, x = expected_tile(operation, rows, out, width, limits), draw(rows, width)
        assert tile is not None
        assert_right(skinny_linear(x, weight, None, tile), x, weight, None)


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
        assert bound.choose(draw(2 * MOST_ROWS, key.width), weight, None).name != IMPLEMENTATION
