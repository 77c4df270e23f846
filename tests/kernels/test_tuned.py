"""Tables of tuned kernels: what is read is what was written, and where nothing was measured nothing changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.kernels import tuned
from strata.kernels.linear.skinny_candidates import candidates, variants
from strata.kernels.linear.skinny_tiles import SkinnyTile, aligned, tiles_of
from strata.kernels.tuned import Choice, Key, row_bucket

TILE = {"kernel": "dot", "columns": 64, "width": 128, "warps": 4, "stages": 4, "splits": 2, "early": False}
ENTRY: dict[str, Any] = {
    "operation": "linear",
    "dtype": "bfloat16",
    "out": 6144,
    "width": 4096,
    "rows": 8,
    "implementation": "skinny",
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
        Key("linear", "bfloat16", 6144, 4096, rows): Choice("skinny", TILE, 1e-5, 2e-5 * rows) for rows in (1, 2, 64)
    } | {Key("linear", "bfloat16", 10, 32, 1): Choice("library", {}, 1e-5, 1e-5)}
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
    assert tiles == {key: SkinnyTile("dot", 64, 128, 4, 4, 2), replace(key, rows=16): None}


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


SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (28672, 4096), (4096, 14336)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("operation", ["linear", "linear_add", "scaled_linear", "scaled_linear_silu_mul"])
def test_every_shape_has_candidates_and_all_of_them_fit(operation: str) -> None:
    for out, width in SHAPES if operation != "linear_add" else [(o, w) for o, w in SHAPES if o in (1024, 4096)]:
        for rows in ROWS:
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
