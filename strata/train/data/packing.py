"""Which documents share a pack: best-fit decreasing (Johnson 1973; for language models Ding et al. 2024)."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray


def best_fit(lengths: ArrayLike, capacity: int) -> list[NDArray[np.int64]]:
    """Indices of `lengths` [n] in packs of at most `capacity` tokens each; nothing is cut.

    The longest goes first, each into the fullest pack that has room. Packs are ordered by the first index in them, so
    that a pack's place says nothing about lengths, and indices rise inside a pack.
    """
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    longest_first = sizes[order]
    if len(sizes) and longest_first[0] > capacity:
        raise ValueError(f"a sample of {longest_first[0]} tokens does not fit a pack of {capacity}")
    pack_of = np.empty(len(sizes), np.int64)
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    count = 0
    starts = np.flatnonzero(np.diff(longest_first, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(sizes)]):
        length = int(longest_first[start])
        while start < end:
            at = bisect_left(room, (length, 0))
            if at < len(room):
                left, pack = room.pop(at)
            else:
                left, pack = capacity, count
                count += 1
            # A pack that takes one of a length is the fullest with room for the next of it, as long as there is any.
            taken = min(end - start, left // length)
            pack_of[order[start : start + taken]] = pack
            insort(room, (left - taken * length, pack))
            start += taken
    members = np.split(np.argsort(pack_of, kind="stable"), np.cumsum(np.bincount(pack_of, minlength=count))[:-1])
    return sorted(members[:count], key=lambda pack: int(pack[0]))
