"""How the weight of a product with few rows is divided among programs, and which division serves which call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.split_counters import MOST_COUNTERS
from strata.kernels.triton_import import HAS_TRITON

MOST_ROWS = 256
GEMV_ROWS = 4
IMPLEMENTATION, PACKED_IMPLEMENTATION = "skinny", "packed, skinny"
# A prefetch brings in pieces of so many elements of k.
PREFETCHED = 128


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


@cache
def device_tiles(device: torch.device | DeviceLimits) -> Tiles:
    """The tiles in the package's table for that CUDA device; none without Triton or without a table."""
    return tiles_of(tuned.read(DeviceLimits.of(device).product)) if HAS_TRITON else MappingProxyType({})
