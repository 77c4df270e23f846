"""The rule for products that no table lists: its tiles fit, it agrees with what was measured, and tables come first."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.bench.kernels.products import Product, products
from strata.bench.kernels.published import PUBLISHED
from strata.kernels import tuned
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.linear.skinny import Launch, launch
from strata.kernels.linear.skinny_tiles import SkinnyTile, tiles_of
from strata.kernels.linear.tile_rule import LIBRARY_TOO, bandwidth, choose_tile, expected_seconds, expected_tile
from tests.kernels.compiled_for import case_of, compile_for

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232448, 132)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def calls() -> Iterator[tuple[Product, int]]:
    for name, sizes in PUBLISHED.items():
        for product in products(name, sizes):
            yield from ((product, rows) for rows in ROWS)


def test_published_models_have_tiles_that_fit() -> None:
    for product, rows in calls():
        tile = expected_tile(product.operation, rows, product.out, product.width, H200)
        if product.operation in LIBRARY_TOO and rows > thresholds_of(MEASURED).linear_rows:
            assert tile is None
            continue
        assert tile is not None, (product, rows)
        assert tile.fits(rows, product.out, product.width)
        if tile.kernel == "dot":  # its pipeline leaves room in shared memory
            assert 2 * (tile.columns + tile.program_rows(rows)) * tile.width * tile.stages <= SHARED_BYTES


@pytest.mark.parametrize("operation", ["linear_add", "scaled_linear_silu_mul"])
def test_tiles_of_published_models_compile_for_hopper(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all sizes of blocks that are chosen, with the most rows of each: within the shared memory, nothing spilled."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    different: dict[tuple[object, ...], tuple[int, Launch]] = {}
    for product, rows in calls():
        tile = expected_tile(product.operation, rows, product.out, product.width, H200)
        if product.operation == operation and rows <= 128:
            assert tile is not None
            sizes = (tile.kernel, tile.columns, tile.width, tile.warps, tile.stages)
            most = tile.program_rows(rows)
            if sizes not in different or different[sizes][0] < most:
                weight = torch.empty(product.out, product.width, dtype=torch.bfloat16, device="meta")
                different[sizes] = most, launch(product.call(rows, weight), tile)
    assert len(different) >= 9
    for sizes, (_, planned) in different.items():
        resources = compile_for(case_of(planned))
        assert resources.spills == 0, sizes
        assert resources.shared_bytes <= SHARED_BYTES, sizes


@pytest.mark.parametrize("shape", [(1, 64), (999, 192), (151936, 1024), (5000, 896), (448, 14 * 64), (8192, 448)])
def test_every_width_of_whole_64_has_a_tile(shape: tuple[int, int]) -> None:
    for rows in range(1, 257):
        tile = expected_tile("scaled_linear", rows, *shape, H200)
        assert tile is not None
        assert tile.fits(rows, *shape)


def test_what_is_not_for_these_kernels_is_left_to_the_library() -> None:
    assert expected_tile("linear", 1, 100, 40, H200) is None  # no block of k divides it
    assert expected_tile("linear", 65, 4096, 4096, H200) is None
    assert expected_tile("linear_add", 257, 4096, 4096, H200) is None
    assert expected_tile("linear", 0, 4096, 4096, H200) is None


def test_only_devices_that_can_start_kernels_early_are_told_to() -> None:
    ampere = DeviceLimits("NVIDIA A100-SXM4-80GB", (8, 0), 166912, 108)
    for rows in ROWS[:7]:
        late = expected_tile("linear", rows, 4096, 4096, ampere)
        assert late is not None
        assert not late.early
        assert not late.prefetch


def test_long_products_of_several_rows_do_not_start_early() -> None:
    """An early start saves a microsecond, and takes room from the kernel ahead."""
    long, short = (expected_tile("scaled_linear_silu_mul", 8, out, 4096, H200) for out in (65536, 4096))
    assert long is not None
    assert short is not None
    assert (long.early, short.early) == (False, True)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_more_processors_and_more_bandwidth_never_take_longer(rows: int) -> None:
    tile = expected_tile("linear", rows, 6144, 4096, H200)
    assert tile is not None
    seconds = [
        expected_seconds("linear", rows, 6144, 4096, tile, DeviceLimits("unheard-of", (9, 0), 232448, processors))
        for processors in (1, 8, 60, 78, 114, 132, 148, 1000)
    ]
    assert seconds == sorted(seconds, reverse=True)
    h100 = DeviceLimits("NVIDIA H100 80GB HBM3", (9, 0), 232448, 132)
    assert bandwidth(h100) < bandwidth(H200)
    assert expected_seconds("linear", rows, 6144, 4096, tile, h100) > seconds[5]


def test_a_product_never_takes_less_than_its_weights_from_memory() -> None:
    for product, rows in calls():
        tile = expected_tile(product.operation, rows, product.out, product.width, H200)
        if tile is not None:
            least = product.nbytes / 4.8e12
            assert expected_seconds(product.operation, rows, product.out, product.width, tile, H200) > least


def test_it_agrees_with_what_was_measured() -> None:
    """Of the table of an H200: the seconds of the winners, and how much the rule's own tiles should lose to them."""
    errors, losses = [], []
    for key, choice in tuned.read("NVIDIA H200").items():
        if choice.implementation != "skinny" or key.dtype != "bfloat16" or key.rows > 128:
            continue
        won = SkinnyTile(**choice.parameters)
        shape = (key.operation, key.rows, key.out, key.width)
        expected = expected_seconds(*shape, won, H200)
        errors.append(abs(expected / choice.seconds - 1))
        tile = expected_tile(*shape, H200)
        if tile is not None:
            losses.append(expected / expected_seconds(*shape, tile, H200) - 1)
    assert len(errors) > 100
    assert statistics.median(errors) < 0.06
    assert statistics.quantiles(errors, n=20)[-1] < 0.25
    assert min(losses) >= 0
    assert statistics.mean(losses) < 0.03


def test_a_table_comes_before_the_rule() -> None:
    key = tuned.Key("linear", "bfloat16", 6144, 4096, 8)
    listed = SkinnyTile("dot", 64, 128, 4, 4, 2)
    tiles = {key: listed, replace(key, rows=16): None}

    def chosen(rows: int, dtype: torch.dtype = torch.bfloat16, out: int = 6144) -> SkinnyTile | None:
        return choose_tile("linear", rows, out, 4096, dtype, tiles, H200)

    assert [chosen(rows) == listed for rows in range(1, 10)] == [False] * 4 + [True] * 4 + [False]
    assert [chosen(rows) is None for rows in (9, 16, 17)] == [True, True, False]
    for other in (chosen(8, torch.float16), chosen(8, out=6272)):
        assert other is not None
        assert other != listed
    assert chosen(300) is None


def test_the_next_larger_number_of_rows_that_was_measured_serves() -> None:
    key = tuned.Key("linear", "bfloat16", 6144, 4096, 128)
    listed = SkinnyTile("dot", 64, 128, 4, 4, 2)
    tiles = {key: listed, replace(key, rows=96): None}
    found = [choose_tile("linear", rows, 6144, 4096, torch.bfloat16, tiles, H200) for rows in (65, 96, 97, 128, 129)]
    assert found == [None, None, listed, listed, None]
    assert choose_tile("linear", 64, 6144, 4096, torch.bfloat16, tiles, H200) is not None


def test_what_only_these_kernels_do_has_a_tile_whatever_a_table_says() -> None:
    tiles = {tuned.Key("linear_add", "bfloat16", 4096, 4096, 8): None}
    assert choose_tile("linear_add", 8, 4096, 4096, torch.bfloat16, tiles, H200) is not None


def test_the_shipped_table_is_followed() -> None:
    tiles = tiles_of(tuned.read("NVIDIA H200"))
    for key, tile in tiles.items():
        dtype = getattr(torch, key.dtype)
        assert choose_tile(key.operation, key.rows, key.out, key.width, dtype, tiles, H200) == tile
