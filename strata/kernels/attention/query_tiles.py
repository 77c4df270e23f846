"""Which queries a tile has, in kernels whose grids have tiles of all sequences one after the other."""

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


@jit
def with_queries(starts, bounds, sequences):
    """Which sequences have queries, the first and the one behind the last, and where those of the first start. bounds:
    [2] int32 of them; None: any may, and starts[0] is 0."""
    if bounds is None:
        return 0, sequences, 0
    else:  # noqa: RET505  what a compiler of kernels would go through besides
        lowest = tl.load(bounds)
        beyond = tl.load(bounds + 1)
        return lowest, beyond, tl.load(starts + lowest)


@jit
def queries_of_tile(tile, starts, offsets, lowest, beyond, skipped, QUERIES: tl.constexpr):
    """A tile's sequence, the row of its first query, how many it has, and which of these is the first of the tile: past
    them if the tile has none. Of sequence s the queries in rows [starts[s], offsets[s + 1])."""
    sequence = sequence_of_tile(tile, starts, lowest, beyond, skipped, QUERIES)
    first = tl.load(starts + sequence)
    new = tl.load(offsets + sequence + 1) - first
    return sequence, first, new, (tile - (first - skipped) // QUERIES - (sequence - lowest)) * QUERIES
