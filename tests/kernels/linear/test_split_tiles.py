"""Tiles of split products: what they consist of, which the rule chooses, and that all that could serve compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.split_products import SHAPES, candidates, table, written
from strata.kernels.device_limits import SHARED_BYTES
from strata.kernels.linear.packed.split_product import (
    SplitTile,
    pieces,
    split_product,
    split_tile,
    sums_bytes,
)
from strata.kernels.quant.packed import pack
from strata.kernels.quant.schemes import SCHEMES
from tests.kernels.compiled_for import compile_for
from tests.kernels.launches.linear import split_case

PROCESSORS = 132
ROWS = (24, 64, 96, 128, 136, 192, 224, 256)


def found(rows: int) -> dict[str, list[SplitTile]]:
    return {name: candidates(rows, *shape, PROCESSORS) for name, shape in SHAPES.items()}


def test_pieces_are_powers_of_two_that_add_up() -> None:
    assert [pieces(size) for size in (64, 96, 192, 224, 256)] == [(64,), (64, 32), (128, 64), (128, 64, 32), (256,)]


@pytest.mark.parametrize(("rows", "columns"), [(192, 96), (224, 64), (64, 240)])
def test_tiles_of_other_pieces_are_refused(rows: int, columns: int) -> None:
    pytest.importorskip("triton")
    weight = pack(torch.randn(256, 128), SCHEMES["int8"])
    values, scales = torch.ones(3, 128, dtype=torch.int8), torch.ones(3, 1)
    with pytest.raises(ValueError, match=rf"a tile of {rows} rows and {columns} columns: either rows may be"):
        split_product(values, scales, weight, None, torch.bfloat16, SplitTile(rows, columns, 1, 8))


@pytest.mark.parametrize("rows", ROWS)
def test_what_could_serve_begins_with_what_is_chosen_and_fits(rows: int) -> None:
    for name, tiles in found(rows).items():
        out, width = SHAPES[name]
        assert tiles[0] == split_tile(rows, out, width, PROCESSORS)
        assert len(set(tiles)) == len(tiles) >= 3
        assert all(tile.fits(width) for tile in tiles)


def test_gate_and_up_of_192_rows_have_a_tile_for_each_processor_in_one_round() -> None:
    """Which is what two rounds of tiles of 256 by 128 are to be measured against."""
    tile = SplitTile(192, 256, 1, 8)
    out, _ = SHAPES["gate_up"]
    assert tile in found(136)["gate_up"]
    assert tile in found(192)["gate_up"]
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
    different = {tile for rows in ROWS for tiles in found(rows).values() for tile in tiles}
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
    assert table([line]).splitlines() == [
        "136 rows: 160.0 us a layer, 110.5 by the fastest tiles (library 140.0)",
        "    qkv: SplitTile(128, 64, 1, 4, 4)",
        "    down: SplitTile(192, 64, 2, 4, 4), not SplitTile(128, 64, 1, 4, 4)",
    ]
