"""Which documents share a pack: best-fit decreasing (Johnson 1973; for language models Ding et al. 2024)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in packs of at most `capacity` tokens each; nothing is cut.

    The longest goes first, each into the fullest pack that has room. Packs are ordered by the first index in them, so
    that a pack's place says nothing about lengths, and indices rise inside a pack.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit a pack of {capacity}")
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, pack = room.pop(at)
        else:
            left, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        insort(room, (left - length, pack))
    return sorted(sorted(pack) for pack in packs)
