"""The tiles worth measuring for a product with few rows: how `strata bench kernels --tune` finds the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.kernels.linear.skinny_tiles import GEMV_ROWS, SkinnyTile
from strata.kernels.tuned import row_bucket

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
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 90, 540
# Registers of a thread that are free for sums: the last program of a tile loads those of all splits at once, and a
# residual takes as many as the sums it is added to.
_MOST_SUMS = 128
# What a later `scaled_linear` should have to add up.
_MOST_BLOCKS = 1024


def candidates(operation: str, rows: int, out: int, width: int, early: bool = True) -> list[SkinnyTile]:
    """The tiles to compare first for so many rows and a weight [out, width]; early: what the device can do (Hopper)."""
    found = [tile for tile in _gemv(rows, width) if _may(tile, operation, rows, out, width)]
    # One row is for "gemv", unless it would have to take a row in many short blocks.
    if rows > 1 or all(tile.width < min(width, _LONG_BLOCK) for tile in found):
        found += [tile for tile in _dot(rows, out, width) if _may(tile, operation, rows, out, width)]
    return [replace(tile, early=early) for tile in found]


def _may(tile: SkinnyTile, operation: str, rows: int, out: int, width: int) -> bool:
    if operation == "linear_add" and (
        tile.columns * _MOST_BLOCKS < out or 2 * _sums(tile.columns, tile.rows, rows, tile.warps) > _MOST_SUMS
    ):
        return False
    return tile.fits(rows, out, width)


def variants(operation: str, tile: SkinnyTile) -> list[SkinnyTile]:
    """A tile, and what may make it faster yet. A `linear` may follow a kernel that leaves nothing to gain early."""
    found = [tile]
    if not tile.early:
        return found
    if tile.kernel == "dot":
        found += [replace(tile, prefetch=prefetch) for prefetch in (512, 2048)]
    if operation == "linear":
        found.append(replace(tile, early=False))
    return found


def _gemv(rows: int, width: int) -> Iterator[SkinnyTile]:
    if rows > GEMV_ROWS:
        return
    for columns, block, warps in _GEMV:
        # About as much of a row at once as there is. Four rows leave no registers for many columns.
        whole = block // 2 < width <= 2 * block
        if (whole or (block >= 2048 and width >= 4096)) and (rows <= 2 or columns <= 4):
            yield SkinnyTile("gemv", columns, block, warps)


def _dot(rows: int, out: int, width: int) -> Iterator[SkinnyTile]:
    shapes = _DOT[next(most for most in _DOT if most >= rows)]
    if all(width % block for _, block, *_ in shapes):
        shapes = (_NARROW_DOT,)
    for columns, block, warps, stages, most in shapes:
        programs = -(-out // columns) * -(-rows // most)
        sums = _sums(columns, most, rows, warps)
        possible = [
            splits
            for splits in _SPLITS
            if width % (splits * block) == 0 and (splits == 1 or splits * sums <= _MOST_SUMS)
        ]
        fitting = [splits for splits in possible if _FEWEST_PROGRAMS <= splits * programs <= _MOST_PROGRAMS]
        if not fitting and possible:
            fitting = possible[:1] if programs > _MOST_PROGRAMS else possible[-1:]
        for splits in fitting:
            yield SkinnyTile("dot", columns, block, warps, stages, splits, rows=most)


def _sums(columns: int, most: int, rows: int, warps: int) -> int:
    """Sums that a thread holds."""
    return columns * min(most, row_bucket(rows)) // (32 * warps)
