"""The rows of a step in two parts, and where the second begins: at half, or where products fill processors better."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from strata.kernels.grid_sizes import ceil_div

PARTS = 2
# What a program of a large product computes at a time. Parts of so many rows or more begin at a multiple of it.
TILE_ROWS, TILE_COLUMNS = 128, 256
# By so many tiles the parts may differ from the half: messages of both still are of about one length.
_MAX_TILES_APART = 4


class RowSplit(NamedTuple):
    """Where rows are divided. products: out and width of each that reads them; processors: which compute a tile each at
    a time. Without them at half.

    A product of 64 tiles of rows by 112 tiles of columns has 54.3 rounds of 132 processors, and two halves of it have
    twice 27.2, so 56 in all; of 33 and 31 tiles of rows 28.0 and 26.3, so 55.
    """

    processors: int = 0
    products: tuple[tuple[int, int], ...] = ()

    def boundary(self, rows: int) -> int:
        """Rows of the first part."""
        half = ceil_div(rows, PARTS)
        if rows < PARTS * TILE_ROWS:
            return half
        half = min(rows, ceil_div(half, TILE_ROWS) * TILE_ROWS)
        apart = range(_MAX_TILES_APART + 1) if self.processors else range(1)
        around = (half + sign * tiles * TILE_ROWS for tiles in apart for sign in (1, -1))
        # The first of the best, so the nearest to the half.
        return min((one for one in around if 0 < one < rows), key=lambda one: self._work(one, rows - one), default=half)

    def _work(self, *parts: int) -> int:
        """What both parts take, in an unknown unit."""
        return sum(self.rounds(rows, out) * width for rows in parts for out, width in self.products)

    def rounds(self, rows: int, out: int) -> int:
        """Of programs that compute all tiles of a product."""
        return ceil_div(ceil_div(rows, TILE_ROWS) * ceil_div(out, TILE_COLUMNS), max(1, self.processors))


AT_HALF = RowSplit()


def max_rows(rows: int) -> int:
    """Of any part, wherever they are divided."""
    return min(rows, AT_HALF.boundary(rows) + _MAX_TILES_APART * TILE_ROWS)


def row_half(x: Tensor, index: int, division: RowSplit) -> Tensor:
    """A view of the rows of the first part or the second."""
    boundary = division.boundary(len(x))
    return x[boundary:] if index else x[:boundary]
