"""How the weight of a product with few rows is divided among programs, and which division serves which call.

`candidates`: the tiles worth measuring: how `strata bench kernels --tune` finds the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.split_counters import MAX_COUNTERS
from strata.kernels.triton_import import HAS_TRITON
from strata.kernels.tuned import row_bucket

MAX_ROWS = 256
GEMV_ROWS = 4
IMPLEMENTATION, QUANTIZED_IMPLEMENTATION = "small M", "quantized, small M"
# A prefetch brings in pieces of so many elements of k.
PREFETCHED = 128


@dataclass(frozen=True)
class SmallMTile:
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
    rows: int = MAX_ROWS

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

    def program_rows(self, rows: int) -> int:
        """Of so many rows of x, how many a program holds sums for, past the last row too."""
        count = next_power_of_2(rows)
        if self.kernel == "gemv":
            return count
        # The least that leaves one kind of instruction to a tile: wgmma to those of 64 columns and more.
        return max(16 if self.columns >= 64 else 8, min(self.rows, count))

    def fits(self, rows: int, out: int, width: int) -> bool:
        """Whether it can multiply so many rows by a weight [out, width]."""
        if self.kernel == "gemv":
            return rows <= GEMV_ROWS and (width <= self.width or width % self.width == 0)
        whole = width % (self.splits * self.width) == 0
        counted = self.splits == 1 or -(-out // self.columns) * -(-rows // self.rows) <= MAX_COUNTERS
        return rows <= MAX_ROWS and whole and counted


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


Tiles = Mapping[tuned.Key, SmallMTile | None]
"""None: something else was faster."""


def tiles_of(table: tuned.Table) -> Tiles:
    """The tiles in a table. Raises ValueError if one is not a tile or does not fit its shape."""
    return MappingProxyType({key: _tile_of(key, choice) for key, choice in table.items()})


def _tile_of(key: tuned.Key, choice: tuned.TunedChoice) -> SmallMTile | None:
    if choice.implementation != IMPLEMENTATION:
        return None
    try:
        tile = SmallMTile(**choice.parameters)
    except TypeError:
        raise ValueError(f"the table's {key} has {dict(choice.parameters)}, which describe no tile") from None
    if not tile.fits(key.rows, key.out, key.width):
        raise ValueError(f"the table's {tile} does not fit {key}")
    return tile


@cache
def device_tiles(device: torch.device | DeviceLimits) -> Tiles:
    """The tiles in the package's table for that CUDA device; none without Triton or without a table."""
    return tiles_of(tuned.read(DeviceLimits.of(device).product)) if HAS_TRITON else MappingProxyType({})


# columns, width, warps; of those that a cost model cannot tell apart, what was faster more often comes first.
_GEMV = (
    (2, 8192, 8),
    (2, 4096, 4),
    (4, 4096, 4),
    (4, 4096, 8),
    (2, 4096, 8),
    (4, 2048, 4),
    (2, 2048, 4),
    (4, 2048, 8),
    (8, 2048, 8),
    (8, 1024, 4),
    (4, 1024, 2),
    (4, 1024, 4),
)
# For the most rows of a call: columns, width, warps, stages, and the most rows of a program.
_DOT = {
    4: ((16, 256, 2, 4, 16), (32, 256, 4, 4, 16), (64, 128, 4, 4, 16), (128, 128, 8, 4, 16)),
    32: (
        (16, 256, 2, 4, 32),
        (32, 256, 4, 4, 32),
        (64, 128, 4, 4, 32),
        (64, 256, 4, 3, 32),
        (128, 128, 8, 4, 32),
    ),
    64: ((64, 128, 4, 4, 32), (64, 128, 4, 4, 64), (64, 64, 4, 6, 64), (128, 128, 8, 4, 64), (128, 64, 8, 6, 64)),
    128: ((64, 128, 4, 4, 64), (64, 64, 4, 5, 128), (64, 128, 8, 4, 128), (128, 64, 8, 5, 128)),
    256: ((64, 128, 4, 4, 64), (64, 64, 4, 5, 128), (128, 64, 8, 5, 128), (64, 64, 8, 4, 256), (128, 64, 8, 4, 256)),
}
# For widths that no other block of k divides.
_NARROW_DOT = (64, 64, 4, 4, 64)
_SPLITS = (1, 2, 4, 8, 16)
# What "gemv" should take at a time, at least, of rows that are longer.
_LONG_BLOCK = 1024
# How many programs a split of k should lead to: enough for all multiprocessors, and not many more.
_FEWEST_PROGRAMS, _MAX_PROGRAMS = 90, 540
# Registers of a thread that are free for sums: the last program of a tile loads those of all splits at once, and a
# residual takes as many as the sums it is added to.
_MAX_SUMS = 128
# What a later `scaled_linear` should have to add up.
_MAX_BLOCKS = 1024


def candidates(operation: str, rows: int, out: int, width: int, early: bool = True) -> list[SmallMTile]:
    """The tiles to compare first for so many rows and a weight [out, width]; early: what the device can do (Hopper)."""
    found = [tile for tile in _gemv(rows, width) if _may(tile, operation, rows, out, width)]
    # One row is for "gemv", unless it would have to take a row in many short blocks.
    if rows > 1 or all(tile.width < min(width, _LONG_BLOCK) for tile in found):
        found += [tile for tile in _dot(rows, out, width) if _may(tile, operation, rows, out, width)]
    return [replace(tile, early=early) for tile in found]


def _may(tile: SmallMTile, operation: str, rows: int, out: int, width: int) -> bool:
    if operation == "linear_add" and (
        tile.columns * _MAX_BLOCKS < out or 2 * _sums(tile.columns, tile.rows, rows, tile.warps) > _MAX_SUMS
    ):
        return False
    return tile.fits(rows, out, width)


def variants(operation: str, tile: SmallMTile) -> list[SmallMTile]:
    """A tile, and what may make it faster yet. A `linear` may follow a kernel that leaves nothing to gain early."""
    found = [tile]
    if not tile.early:
        return found
    if tile.kernel == "dot":
        found += [replace(tile, prefetch=prefetch) for prefetch in (512, 2048)]
    if operation == "linear":
        found.append(replace(tile, early=False))
    return found


def _gemv(rows: int, width: int) -> Iterator[SmallMTile]:
    if rows > GEMV_ROWS:
        return
    for columns, block, warps in _GEMV:
        # About as much of a row at once as there is. Four rows leave no registers for many columns.
        whole = block // 2 < width <= 2 * block
        if (whole or (block >= 2048 and width >= 4096)) and (rows <= 2 or columns <= 4):
            yield SmallMTile("gemv", columns, block, warps)


def _dot(rows: int, out: int, width: int) -> Iterator[SmallMTile]:
    shapes = _DOT[next(most for most in _DOT if most >= rows)]
    if all(width % block for _, block, *_ in shapes):
        shapes = (_NARROW_DOT,)
    for columns, block, warps, stages, most in shapes:
        programs = -(-out // columns) * -(-rows // most)
        sums = _sums(columns, most, rows, warps)
        possible = [
            splits
            for splits in _SPLITS
            if width % (splits * block) == 0 and (splits == 1 or splits * sums <= _MAX_SUMS)
        ]
        fitting = [splits for splits in possible if _FEWEST_PROGRAMS <= splits * programs <= _MAX_PROGRAMS]
        if not fitting and possible:
            fitting = possible[:1] if programs > _MAX_PROGRAMS else possible[-1:]
        for splits in fitting:
            yield SmallMTile("dot", columns, block, warps, stages, splits, rows=most)


def _sums(columns: int, most: int, rows: int, warps: int) -> int:
    """Sums that a thread holds."""
    return columns * min(most, row_bucket(rows)) // (32 * warps)
