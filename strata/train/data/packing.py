"""Which documents share a pack: best fit (Johnson 1973), decreasing for long ones (Ding et al. 2024)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike, NDArray


def best_fit(lengths: ArrayLike, capacity: int) -> list[NDArray[np.int64]]:
    """Indices of `lengths` [n] in packs of at most `capacity` tokens each; nothing is cut.

    Each goes into the fullest pack that has room: first those over a quarter of a pack, the longest first, then the
    others in their order. Sorting those as well would fill packs no better, and documents of one length, which are
    often of one kind, would share a pack. Packs are ordered by the first index in them, so that a pack's place says
    nothing about lengths, and indices rise inside a pack.
    """
    sizes = np.asarray(lengths, np.int64)
    if (longest := sizes.max(initial=0)) > capacity:
        raise ValueError(f"a sample of {longest} tokens does not fit a pack of {capacity}")
    shortest = sizes.min(initial=capacity)
    order = np.argsort(np.where(sizes > capacity // 4, -sizes, 0), kind="stable")
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending; without the packs that nothing fits into
    for index, length in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, pack = room.pop(at)
        else:
            left, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        if left - length >= shortest:
            insort(room, (left - length, pack))
    return [np.array(pack) for pack in sorted(sorted(pack) for pack in packs)]
