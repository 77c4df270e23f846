"""Which sequence a tile of queries is of, in kernels whose grids have tiles of all sequences one after the other."""

from __future__ import annotations

from strata.kernels.triton_import import jit, tl


@jit
def sequence_of_tile(tile, starts, lowest, beyond, skipped, QUERIES: tl.constexpr):
    """The sequence, of [lowest, beyond), that has the tile, in so many QUERIES each: sequence s begins with tile
    starts[s] // QUERIES + s, where both are counted from `lowest` on, of which `skipped` is the start; the last that
    begins at this tile or before is found by halves."""
    sequence = lowest
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if (tl.load(starts + middle) - skipped) // QUERIES + middle - lowest <= tile:
            sequence = middle
        else:
            beyond = middle
    return sequence
