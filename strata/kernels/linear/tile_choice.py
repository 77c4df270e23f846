"""Which tile serves a call: the one that the device's table lists for it, or else what the cost model expects."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.device_limits import LEAST_CAPABILITY, DeviceLimits
from strata.kernels.linear.packed import few_rows
from strata.kernels.linear.skinny_tiles import MOST_ROWS, SkinnyTile, Tiles, aligned, device_tiles
from strata.kernels.linear.tile_rule import LIBRARY_TOO, expected_tile
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import HAS_TRITON

# Shapes of calls whose tile stays known.
_MOST_SHAPES = 8192


def chosen_tile(operation: str, x: Tensor, weight: Tensor | PackedWeight) -> SkinnyTile | None:
    """The tile for x [..., width] and weight [out, width]; None where something else is faster or no tile fits."""
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= MOST_ROWS:  # before anything that takes time: prefill comes this way too
        return None
    if isinstance(weight, PackedWeight):
        # Only what the library has, too, is multiplied in 8 bits otherwise.
        return few_rows.chosen_tile(x, weight, few_rows.max_rows(x, weight) if operation in LIBRARY_TOO else MOST_ROWS)
    tile = _device_tile(operation, rows, out, width, x.dtype, DeviceLimits.of(x.device))
    return tile if tile is not None and aligned(x, weight) else None


@lru_cache(_MOST_SHAPES)
def _device_tile(
    operation: str, rows: int, out: int, width: int, dtype: torch.dtype, device: DeviceLimits
) -> SkinnyTile | None:
    if not HAS_TRITON or device.capability < LEAST_CAPABILITY:
        return None
    return choose_tile(operation, rows, out, width, dtype, device_tiles(device), device)


def choose_tile(
    operation: str, rows: int, out: int, width: int, dtype: torch.dtype, tiles: Tiles, device: DeviceLimits
) -> SkinnyTile | None:
    """The tile of a table, or else the one that the rule expects to be fastest; None: the library is.

    Only the operations of `LIBRARY_TOO` are the library's where a table says so.
    """
    key = tuned.serving_key(tiles, tuned.Key(operation, str(dtype).removeprefix("torch."), out, width, rows))
    if key is not None and (operation in LIBRARY_TOO or tiles[key] is not None):
        return tiles[key]
    return expected_tile(operation, rows, out, width, device)
