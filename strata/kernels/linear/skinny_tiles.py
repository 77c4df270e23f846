"""How the weight of a product with few rows is divided among programs, and which division serves which call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.split_counters import MOST_COUNTERS
from strata.kernels.triton_import import HAS_TRITON

MOST_ROWS = 256
GEMV_ROWS = 4
IMPLEMENTATION = "skinny"
# A prefetch brings in pieces of so many elements of k.
PREFETCHED = 128
# Shapes of calls whose tile stays known.
_MOST_SHAPES = 8192


@dataclass(frozen=True)
class SkinnyTile:
    """How a weight is divided among programs.

    kernel: "gemv" (CUDA cores, at most four rows) or "dot" (tensor cores). columns, width: rows of the weight (columns
    of the product) and elements of each that a program holds at a time. stages: of the pipeline ("dot" only).
    splits: parts of k, each with programs of its own ("dot" only); set by the shape of the weight, not by the number of
    rows. rows: the most rows of x that a program takes; more are divided among programs.
    early: launched before the kernel ahead of it has ended (programmatic dependent launch), which must not be one that
    writes the weights: "gemv" loads its first weights while it waits, and "dot" brings the first `prefetch` elements of
    each row of its weights into the L2 cache.
    """

    kernel: str
    columns: int
    width: int
    warps: int
    stages: int = 1
    splits: int = 1
    early: bool = False
    prefetch: int = 0
    rows: int = MOST_ROWS

    def __post_init__(self) -> None:
        sizes = (self.columns, self.width, self.warps, self.rows, self.stages, self.splits)
        if any(type(size) is not int or size < 1 for size in sizes) or type(self.early) is not bool:
            raise ValueError(f"a tile has positive whole numbers and true or false for early, not {asdict(self)}")
        if self.kernel not in ("gemv", "dot") or self.columns < 2 or any(size & (size - 1) for size in sizes[:4]):
            raise ValueError(f"a tile is for gemv or dot, and its sizes are powers of two: {asdict(self)}")
        if self.kernel == "gemv" and (self.splits, self.stages, self.prefetch) != (1, 1, 0):
            raise ValueError(f"gemv has one split, one stage and its own way to prefetch, not {asdict(self)}")
        if type(self.prefetch) is not int or self.prefetch % PREFETCHED or self.prefetch & (self.prefetch - 1):
            raise ValueError(f"a tile prefetches a power of two of {PREFETCHED} elements or more, not {asdict(self)}")
        if self.prefetch and not self.early:
            raise ValueError(f"only a tile that is launched early has time to prefetch, not {asdict(self)}")

    def fits(self, rows: int, out: int, width: int) -> bool:
        """Whether it can multiply so many rows by a weight [out, width]."""
        if self.kernel == "gemv":
            return rows <= GEMV_ROWS and (width <= self.width or width % self.width == 0)
        whole = width % (self.splits * self.width) == 0
        counted = self.splits == 1 or -(-out // self.columns) * -(-rows // self.rows) <= MOST_COUNTERS
        return rows <= MOST_ROWS and whole and counted


def aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take these: 16-bit floats whose rows can be loaded 16 bytes at a time."""
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % 16 == 0
        and weight.stride(1) == x.stride(-1) == 1
        and weight.stride(0) % 16 == 0
        and (x.dim() < 2 or x.stride(-2) % 16 == 0)
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


Tiles = Mapping[tuned.Key, SkinnyTile | None]
"""None: something else was faster."""


def tiles_of(table: tuned.Table) -> Tiles:
    """The tiles in a table. Raises ValueError if one is not a tile or does not fit its shape."""
    return MappingProxyType({key: _tile_of(key, choice) for key, choice in table.items()})


def _tile_of(key: tuned.Key, choice: tuned.Choice) -> SkinnyTile | None:
    if choice.implementation != IMPLEMENTATION:
        return None
    try:
        tile = SkinnyTile(**choice.parameters)
    except TypeError:
        raise ValueError(f"the table's {key} has {dict(choice.parameters)}, which describe no tile") from None
    if not tile.fits(key.rows, key.out, key.width):
        raise ValueError(f"the table's {tile} does not fit {key}")
    return tile


def choose_tile(operation: str, rows: int, out: int, width: int, dtype: torch.dtype, tiles: Tiles) -> SkinnyTile | None:
    """The tile that was measured to be fastest, or None: the library was, or nothing was measured."""
    if not 0 < rows <= MOST_ROWS:
        return None
    return tuned.serving(tiles, tuned.Key(operation, str(dtype).removeprefix("torch."), out, width, rows))


@cache
def device_tiles(device: torch.device | DeviceLimits) -> Tiles:
    """The tiles in the package's table for that CUDA device; none without Triton or without a table."""
    return tiles_of(tuned.read(DeviceLimits.of(device).product)) if HAS_TRITON else MappingProxyType({})


@lru_cache(_MOST_SHAPES)
def _device_tile(
    device: torch.device | DeviceLimits, operation: str, rows: int, out: int, width: int, dtype: torch.dtype
) -> SkinnyTile | None:
    return choose_tile(operation, rows, out, width, dtype, device_tiles(device))


def tuned_tile(operation: str, x: Tensor, weight: Tensor) -> SkinnyTile | None:
    """The tile of the device's table for x [..., width] and weight [out, width]; None if it has none for them."""
    out, width = weight.shape
    rows = x.numel() // width
    if rows > MOST_ROWS:  # before anything that takes time: prefill comes this way too
        return None
    tile = _device_tile(x.device, operation, rows, out, width, x.dtype)
    return tile if tile is not None and aligned(x, weight) else None


def any_tile(operation: str, x: Tensor, weight: Tensor) -> SkinnyTile | None:
    """The tuned tile, or else one that should do; None where no tile fits."""
    found = tuned_tile(operation, x, weight)
    if found is not None:
        return found
    out, width = weight.shape
    rows = x.numel() // width
    major, _ = DeviceLimits.of(x.device).capability
    if not 0 < rows <= MOST_ROWS or major < 8 or not aligned(x, weight):
        return None
    return untuned_tile(rows, out, width, early=major >= 9)


# Programs that keep the multiprocessors of a large GPU busy.
_PROGRAMS = 256


@cache
def untuned_tile(rows: int, out: int, width: int, early: bool) -> SkinnyTile | None:
    """A tile for a shape that was not measured, small enough for any GPU since Ampere; None if width fits none."""
    if rows <= GEMV_ROWS // 2:
        for block in (2048, 1024, 512, 256):
            if width % block == 0:
                return SkinnyTile("gemv", 4 if out <= 4096 else 8, block, max(1, block // 256), early=early)
    deep = 128 if rows <= 32 and width % 128 == 0 else 64
    if width % deep:
        return None
    splits = 1
    while splits < 8 and width % (2 * splits * deep) == 0 and 2 * splits * -(-out // 64) <= _PROGRAMS:
        splits *= 2
    return SkinnyTile("dot", 64, deep, 4, 3, splits, early, rows=64)
