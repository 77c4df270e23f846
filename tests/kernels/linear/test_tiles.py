"""Tiles of products: the rules that choose them where no table does, what tables tell, and that all compile and fit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.products import Product, products
from benchmarks.kernels.published import PUBLISHED
from benchmarks.split_products import SHAPES, written
from benchmarks.split_products import candidates as split_tiles_of
from benchmarks.split_products import table as split_table
from strata.kernels import tuned
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.linear.quantized.split_product import (
    SplitTile,
    pieces,
    split_product,
    split_tile,
    sums_bytes,
)
from strata.kernels.linear.small_m import Launch, launch
from strata.kernels.linear.small_m_tiles import SmallMTile, aligned, candidates, tiles_of, variants
from strata.kernels.linear.tile_rule import LIBRARY_TOO, bandwidth, choose_tile, expected_seconds, expected_tile
from strata.kernels.quant.quantized import pack
from strata.kernels.quant.schemes import SCHEMES
from strata.kernels.tuned import Key, TunedChoice, row_bucket
from tests.kernels.compiled_for import case_of, compile_for
from tests.kernels.launches.linear import split_case

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
        if choice.implementation != "small M" or key.dtype != "bfloat16" or key.rows > 128:
            continue
        won = SmallMTile(**choice.parameters)
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
    listed = SmallMTile("dot", 64, 128, 4, 4, 2)
    tiles = {key: listed, replace(key, rows=16): None}

    def chosen(rows: int, dtype: torch.dtype = torch.bfloat16, out: int = 6144) -> SmallMTile | None:
        return choose_tile("linear", rows, out, 4096, dtype, tiles, H200)

    assert [chosen(rows) == listed for rows in range(1, 10)] == [False] * 4 + [True] * 4 + [False]
    assert [chosen(rows) is None for rows in (9, 16, 17)] == [True, True, False]
    for other in (chosen(8, torch.float16), chosen(8, out=6272)):
        assert other is not None
        assert other != listed
    assert chosen(300) is None


def test_the_next_larger_number_of_rows_that_was_measured_serves() -> None:
    key = tuned.Key("linear", "bfloat16", 6144, 4096, 128)
    listed = SmallMTile("dot", 64, 128, 4, 4, 2)
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


PROCESSORS = 132
SPLIT_ROWS = (24, 64, 96, 128, 136, 192, 224, 256)


def split_candidates(rows: int) -> dict[str, list[SplitTile]]:
    return {name: split_tiles_of(rows, *shape, PROCESSORS) for name, shape in SHAPES.items()}


def test_pieces_are_powers_of_two_that_add_up() -> None:
    assert [pieces(size) for size in (64, 96, 192, 224, 256)] == [(64,), (64, 32), (128, 64), (128, 64, 32), (256,)]


@pytest.mark.parametrize(("rows", "columns"), [(192, 96), (224, 64), (64, 240)])
def test_tiles_of_other_pieces_are_refused(rows: int, columns: int) -> None:
    pytest.importorskip("triton")
    weight = pack(torch.randn(256, 128), SCHEMES["int8"])
    values, scales = torch.ones(3, 128, dtype=torch.int8), torch.ones(3, 1)
    with pytest.raises(ValueError, match=rf"a tile of {rows} rows and {columns} columns: either rows may be"):
        split_product(values, scales, weight, None, torch.bfloat16, SplitTile(rows, columns, 1, 8))


@pytest.mark.parametrize("rows", SPLIT_ROWS)
def test_what_could_serve_begins_with_what_is_chosen_and_fits(rows: int) -> None:
    for name, tiles in split_candidates(rows).items():
        out, width = SHAPES[name]
        assert tiles[0] == split_tile(rows, out, width, PROCESSORS)
        assert len(set(tiles)) == len(tiles) >= 3
        assert all(tile.fits(width) for tile in tiles)


def test_gate_and_up_of_192_rows_have_a_tile_for_each_processor_in_one_round() -> None:
    """Which is what two rounds of tiles of 256 by 128 are to be measured against."""
    tile = SplitTile(192, 256, 1, 8)
    out, _ = SHAPES["gate_up"]
    assert tile in split_candidates(136)["gate_up"]
    assert tile in split_candidates(192)["gate_up"]
    assert out // tile.columns == 112 <= PROCESSORS < out // 128


def test_sums_of_parts_are_counted_of_whole_tiles() -> None:
    """32 tiles of 192 x 128, four parts each, float32."""
    assert sums_bytes(SplitTile(192, 128, 4, 8), 136, 4096) == 32 * 192 * 128 * 4 * 4
    assert sums_bytes(SplitTile(192, 128, 1, 8), 136, 4096) == 0


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.long)], ids=["a sixth", "all"])
def test_all_that_could_serve_compile_for_hopper(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spilled; four or eight warps of every one use tensor cores."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    different = {tile for rows in SPLIT_ROWS for tiles in split_candidates(rows).values() for tile in tiles}
    assert len(different) > 30
    for tile in sorted(different, key=repr)[::share]:
        case = split_case("e4m3", tile)
        resources = compile_for(case)
        assert resources.spills == 0, tile
        assert resources.shared_bytes <= SHARED_BYTES, tile
        assert all(instruction in resources.ptx for instruction in case.must_contain), tile


def test_the_table_names_what_is_faster_than_what_is_chosen() -> None:
    chosen = SplitTile(128, 64, 1, 4)
    faster = replace(chosen, rows=192, splits=2)
    names = {"qkv": (chosen, chosen), "down": (chosen, faster)}
    line = {
        "layer": 136,
        "us": 160.0,
        "fastest_us": 110.5,
        "sums": {"library": 140.0},
        "chosen": {name: written(tile) for name, (tile, _) in names.items()},
        "fastest": {name: written(tile) for name, (_, tile) in names.items()},
    }
    assert split_table([line]).splitlines() == [
        "136 rows: 160.0 us a layer, 110.5 by the fastest tiles (library 140.0)",
        "    qkv: SplitTile(128, 64, 1, 4, 4)",
        "    down: SplitTile(192, 64, 2, 4, 4), not SplitTile(128, 64, 1, 4, 4)",
    ]


TILE = {"kernel": "dot", "columns": 64, "width": 128, "warps": 4, "stages": 4, "splits": 2, "early": False}
ENTRY: dict[str, Any] = {
    "operation": "linear",
    "dtype": "bfloat16",
    "out": 6144,
    "width": 4096,
    "rows": 8,
    "implementation": "small M",
    "parameters": TILE,
    "seconds": 1.5e-5,
    "library_seconds": 1.8e-5,
}


def table(folder: Path, *entries: dict[str, Any], device: str = "NVIDIA Test 1") -> Path:
    path = folder / "nvidia_test_1.json"
    path.write_text(json.dumps({"device": device, "entries": entries}), encoding="utf-8")
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    wanted = {
        Key("linear", "bfloat16", 6144, 4096, rows): TunedChoice("small M", TILE, 1e-5, 2e-5 * rows)
        for rows in (1, 2, 64)
    } | {Key("linear", "bfloat16", 10, 32, 1): TunedChoice("library", {}, 1e-5, 1e-5)}
    path = tuned.path_of("NVIDIA Test 1", tmp_path / "new")
    tuned.write(path, "NVIDIA Test 1", wanted)
    assert path == tmp_path / "new" / "nvidia_test_1.json"
    assert tuned.read_file(path) == wanted
    assert tuned.read("NVIDIA Test 1", tmp_path / "new") == wanted


def test_a_write_that_is_interrupted_leaves_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path, ENTRY)
    before, write_text = tuned.read_file(path), Path.write_text

    def interrupted(file: Path, text: str, **options: Any) -> int:
        write_text(file, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned.write(path, "NVIDIA Test 1", {})
    assert tuned.read_file(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_without_a_table_has_no_tiles(tmp_path: Path) -> None:
    assert tuned.read("Unheard-of GPU", tmp_path) == {}
    assert tiles_of(tuned.read("Unheard-of GPU", tmp_path)) == {}


def test_a_table_cannot_be_changed(tmp_path: Path) -> None:
    read = tuned.read_file(table(tmp_path, ENTRY))
    with pytest.raises(TypeError):
        read[next(iter(read))] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        next(iter(read.values())).parameters["columns"] = 8  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": "8"}, "rows"),
        ({"seconds": True}, "seconds"),
        ({"parameters": [1]}, "parameters"),
        ({"colour": "red"}, "no others"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"entry 1 of .*{said}"):
        tuned.read_file(table(tmp_path, ENTRY, ENTRY | change))


def test_where_something_else_was_faster_is_listed_too(tmp_path: Path) -> None:
    tiles = tiles_of(tuned.read_file(table(tmp_path, ENTRY, ENTRY | {"rows": 16, "implementation": "library"})))
    key = Key("linear", "bfloat16", 6144, 4096, 8)
    assert tiles == {key: SmallMTile("dot", 64, 128, 4, 4, 2), replace(key, rows=16): None}


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nvidia_test_1.json"
    for text in ("{", "[]", '{"device": "x"}', '{"device": "x", "entries": null}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"nvidia_test_1\.json"):
            tuned.read_file(path)
    with pytest.raises(ValueError, match="repeats"):
        tuned.read_file(table(tmp_path, ENTRY, ENTRY))


@pytest.mark.parametrize(
    "tile",
    [
        TILE | {"kernel": "other"},
        TILE | {"columns": 0},
        TILE | {"columns": 48},
        TILE | {"early": 1},
        TILE | {"depth": 3},
        TILE | {"splits": 3},  # which do not divide 4096
        TILE | {"prefetch": 512},  # though it is not launched early
        TILE | {"early": True, "prefetch": 100},
        TILE | {"rows": 48},
        TILE | {"kernel": "gemv"},  # which neither splits nor has stages
        {"kernel": "gemv", "columns": 4, "width": 4096, "warps": 8},  # and not for eight rows
    ],
)
def test_a_tile_that_cannot_run_is_refused(tmp_path: Path, tile: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"[Tt]ile|gemv"):
        tiles_of(tuned.read_file(table(tmp_path, ENTRY | {"parameters": tile})))


def test_row_buckets() -> None:
    assert [row_bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 33, 64, 129)] == [1, 2, 4, 4, 8, 8, 16, 64, 64, 256]


TUNED_SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (28672, 4096), (4096, 14336)]
TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("operation", ["linear", "linear_add", "scaled_linear", "scaled_linear_silu_mul"])
def test_every_shape_has_candidates_and_all_of_them_fit(operation: str) -> None:
    for out, width in (
        TUNED_SHAPES if operation != "linear_add" else [(o, w) for o, w in TUNED_SHAPES if o in (1024, 4096)]
    ):
        for rows in TUNED_ROWS:
            found = candidates(operation, rows, out, width)
            assert len(found) == len(set(found)) >= 3
            for tile in found:
                assert tile.fits(rows, out, width)
                assert tile in variants(operation, tile)
                assert len(variants(operation, tile)) >= 1 + (tile.kernel == "dot")
                if tile.kernel == "dot":  # its pipeline leaves room in shared memory
                    block = min(tile.rows, max(16, rows))
                    assert 2 * (tile.columns + block) * tile.width * tile.stages <= 227 * 1024


def test_a_device_without_early_launches_is_offered_none() -> None:
    early, late = (candidates("linear", 16, 4096, 4096, launched) for launched in (True, False))
    assert [replace(tile, early=False) for tile in early] == late
    assert all(variants("linear", tile) == [tile] for tile in late)
    assert all(any(tile.prefetch for tile in variants("linear", tile)) for tile in early)


def test_splits_of_k_fill_a_gpu() -> None:
    for tile in candidates("linear_add", 16, 1024, 2048):
        assert 90 <= tile.splits * 1024 // tile.columns <= 540
    assert {tile.splits for tile in candidates("linear", 16, 151936, 1024)} == {1}


def test_operands_that_cannot_be_loaded_16_bytes_at_a_time_are_refused() -> None:
    weight = torch.zeros(8, 1024, dtype=torch.bfloat16)
    x = torch.zeros(4, 2048, dtype=torch.bfloat16)
    assert aligned(x[:, :1024], weight)
    assert aligned(x[:, 8:1032], weight)
    assert aligned(x[0, :1024], weight)
    assert not aligned(x[:, 1:1025], weight)
    assert not aligned(x[:, ::2], weight)
    assert not aligned(x[:, :1024].float(), weight)
    assert not aligned(x[:, :1001], torch.zeros(8, 1001, dtype=torch.bfloat16))
    assert not aligned(torch.zeros(4, 1028, dtype=torch.bfloat16)[:, :1024], weight)
